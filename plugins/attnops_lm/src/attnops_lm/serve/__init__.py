"""A server with the API of OpenAI's clients: requests join and leave a batch between steps; their caches are pages.

`attnops serve` runs it. Its layers, the lowest first: `Pages`, the bookkeeping of pages; `Engine`, which forms a batch
for every step; `application`, the HTTP endpoints.

Dimensions: `R` rows, the requests that run at a time; `M` pages per row; `N` tokens per step; `V` vocabulary.
"""

from attnops_lm.serve.endpoints import Server, application
from attnops_lm.serve.engine import Engine, QueueFullError, StoppedError
from attnops_lm.serve.loading import load_model
from attnops_lm.serve.pages import Pages
from attnops_lm.serve.request import Delta, Request

__all__ = [
    "Delta",
    "Engine",
    "Pages",
    "QueueFullError",
    "Request",
    "Server",
    "StoppedError",
    "application",
    "load_model",
]
