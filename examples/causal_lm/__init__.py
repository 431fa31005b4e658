"""A decoder-only language model in flax.nnx: its attention made by attnops, its weights from Hugging Face or GGUF."""

from .config import Config, Experts
from .model import CausalLM, CausalLMOutput, SequenceClassifier, SequenceClassifierOutput

__all__ = ["CausalLM", "CausalLMOutput", "Config", "Experts", "SequenceClassifier", "SequenceClassifierOutput"]
