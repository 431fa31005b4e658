"""``python -m attnops_lm.serve``: SmolLM2-135M-Instruct, or a checkpoint, served."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnops_caches import Quantized
from attnops_lm.compilation import VARIABLE, default_folder, keep_programs
from attnops_lm.serve.engine import Engine
from attnops_lm.serve.process import serve

if TYPE_CHECKING:
    from attnops_lm.model import CausalLM
    from attnops_lm.tokenizer import Tokenizer


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve SmolLM2-135M-Instruct, or a checkpoint.

    Returns:
        An exit status: 0 after a signal, 1 if the engine failed, 2 if the model can't be served, 130 if it was
        interrupted before it served.
    """
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
    parser.add_argument(
        "--compilation-cache",
        help=f"where compiled programs are kept, or 'off'; else ${VARIABLE}, or {default_folder()}",
    )
    given = parser.parse_args(arguments)
    with contextlib.suppress(KeyboardInterrupt):
        return _serve(given)
    return 130


def _serve(given: argparse.Namespace) -> int:
    keep_programs(given.compilation_cache)
    try:
        model, tokenizer = load_model(given.checkpoint, given.operation)
        engine = Engine(
            model, tokenizer, rows=given.rows, pages=given.pages, page_size=given.page_size,
            max_length=given.max_length, chunks=given.chunks, max_waiting=given.max_waiting,
            prefix_sharing=not given.no_prefix_sharing, codec=Quantized(given.codec) if given.codec else None,
        )  # fmt: skip
    except (FileNotFoundError, ModuleNotFoundError, ValueError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 2
    engine.warm()
    return serve(engine, given.name, host=given.host, port=given.port)


def load_model(checkpoint: str | None, operation: str) -> tuple[CausalLM, Tokenizer]:
    """A model and its tokenizer: of a directory in Hugging Face's format, or SmolLM2-135M-Instruct.

    Raises:
        FileNotFoundError: the directory lacks a file, such as the tokenizer.
        ModuleNotFoundError: SmolLM2 is not installed.
        ValueError: a model that is not mapped, or weights that don't fit it.
    """
    from attnops_lm.gguf_file import load_smollm2
    from attnops_lm.model import CausalLM
    from attnops_lm.tokenizer import Tokenizer

    if checkpoint is None:
        return load_smollm2(operation=operation)
    tokenizer = Tokenizer.from_pretrained(checkpoint)  # first: weights take long to read
    model = CausalLM.from_pretrained(checkpoint, operation=operation)
    tokenizer.eos_ids = model.config.eos_token_ids or tokenizer.eos_ids
    return model, tokenizer
