"""Greedy tokens of SGLang's engine, with one attention backend, of the model in a folder; one line of JSON.

python greedy.py FOLDER BACKEND PAGE PROMPTS COUNT

PAGE is the size of a page; PROMPTS are calls in JSON, each a list of lists of token ids.
"""

import json
import sys


def main(folder: str, backend: str, page: str, prompts: str, count: str) -> None:
    import jax
    from sgl_jax.srt.entrypoints.engine import Engine

    # The engine writes the next step into arrays of NumPy that JAX shares on a CPU: each step must end first.
    jax.config.update("jax_cpu_enable_async_dispatch", False)

    engine = Engine(
        model_path=folder, device="cpu", dtype="float32", attention_backend=backend, skip_tokenizer_init=True,
        enable_single_process=True, disable_precompile=True, context_length=256, page_size=int(page),
        max_total_tokens=1024, max_running_requests=8, chunked_prefill_size=64, max_prefill_tokens=64,
        device_indexes=[0], random_seed=0, log_level="error",
    )  # fmt: skip
    sampling = {"temperature": 0, "max_new_tokens": int(count), "ignore_eos": True}
    answers = []
    for several in json.loads(prompts):  # one call after another: the second finds prefixes of the first
        answers += [x["output_ids"] for x in engine.generate(input_ids=several, sampling_params=sampling)]
    print(json.dumps(answers), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
