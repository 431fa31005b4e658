"""Generation of text: greedy, sampled and beam search, over every cache, with prompt lookup and streaming."""

from attnops_lm.generation.config import GenerationConfig
from attnops_lm.generation.loop import Generated
from attnops_lm.generation.mixin import Generation
from attnops_lm.generation.sampling import Sampling, sample
from attnops_lm.generation.speculative import look_up
from attnops_lm.generation.text import Detokenizer, StopStrings, Streamer, TextOfRow, TextStreamer

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
