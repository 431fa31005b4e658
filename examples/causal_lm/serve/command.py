"""``python -m examples.causal_lm.serve``: SmolLM2-135M-Instruct, or a checkpoint, served."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

import uvicorn

from attnops.caches import Quantized

from .endpoints import application
from .engine import Engine

if TYPE_CHECKING:
    from ..model import CausalLM
    from ..tokenizer import Tokenizer


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve SmolLM2-135M-Instruct, or a checkpoint."""
    parser = argparse.ArgumentParser(prog="serve", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoint", help="a directory in Hugging Face's format; without one, SmolLM2-135M-Instruct")
    parser.add_argument("--name", default="smollm2-135m-instruct", help="the model's name for clients")
    parser.add_argument("--operation", default="flash", help="the attention, of any installed distribution")
    parser.add_argument(
        "--codec", choices=["int8", "float8_e4m3fn", "float8_e5m2"], help="how keys and values are stored"
    )
    for name, default, text in (
        ("rows", 16, "requests that run at a time"), ("pages", 1024, "pages of all requests together"),
        ("page-size", 16, "tokens a page"), ("max-length", 2048, "most tokens of a request, prompt included"),
        ("max-waiting", 256, "most requests that wait; more get status 429"),
        ("port", 8000, "0 for any that is free"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 256], help="tokens a step, each a program")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--no-prefix-sharing", action="store_true", help="compute every prompt from its first token")
    given = parser.parse_args(arguments)
    model, tokenizer = load_model(given.checkpoint, given.operation)
    engine = Engine(
        model, tokenizer, rows=given.rows, pages=given.pages, page_size=given.page_size, max_length=given.max_length,
        chunks=given.chunks, max_waiting=given.max_waiting, prefix_sharing=not given.no_prefix_sharing,
        codec=Quantized(given.codec) if given.codec else None,
    )  # fmt: skip
    engine.warm()
    uvicorn.run(application(engine, given.name), host=given.host, port=given.port, log_level="info")


def load_model(checkpoint: str | None, operation: str) -> tuple[CausalLM, Tokenizer]:
    """A model and its tokenizer: of a directory in Hugging Face's format, or SmolLM2-135M-Instruct."""
    from ..gguf_file import load_smollm2
    from ..model import CausalLM
    from ..tokenizer import Tokenizer

    if checkpoint is None:
        return load_smollm2(operation=operation)
    model = CausalLM.from_pretrained(checkpoint, operation=operation)
    return model, Tokenizer.from_pretrained(checkpoint, model.config.eos_token_ids)
