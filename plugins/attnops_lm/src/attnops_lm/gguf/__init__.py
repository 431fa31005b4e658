"""How GGUF files are read: `file` opens them, `config` reads sizes, `tensors` weights, `tokens` the tokenizer.

`attnops_lm.gguf_file` puts these together.
"""
