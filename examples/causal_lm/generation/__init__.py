"""Generation of text: greedy, sampled and beam search, over every cache, with prompt lookup and streaming."""

from .config import GenerationConfig
from .loop import Generated
from .mixin import Generation
from .sampling import Sampling, sample
from .speculative import look_up
from .text import Detokenizer, StopStrings, Streamer, TextOfRow, TextStreamer

__all__ = [
    "Detokenizer",
    "Generated",
    "Generation",
    "GenerationConfig",
    "Sampling",
    "StopStrings",
    "Streamer",
    "TextOfRow",
    "TextStreamer",
    "look_up",
    "sample",
]
