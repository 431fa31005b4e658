"""`attnops serve`: a server of SmolLM2-135M-Instruct, or of a checkpoint."""

from __future__ import annotations

import contextlib
import os
from typing import Annotated

import typer

from attnops import PluginError
from attnops_cli.output import fail
from attnops_lm.compilation import VARIABLE, default_folder, keep_programs

KEYS = "ATTNOPS_API_KEY"  # the environment variable of API keys, which other users can't read, unlike arguments


# A parameter for each option of the command line, which typer reads from the signature.
def command(
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="A directory in Hugging Face's format, or a GGUF file.", show_default="SmolLM2-135M-Instruct"
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="The model's name for clients.")] = "smollm2-135m-instruct",
    operation: Annotated[str, typer.Option(help="The attention operation, of any installed distribution.")] = "flash",
    dtype: Annotated[
        str, typer.Option(help="Of weights, keys, values and computation: float32, bfloat16 or float16.")
    ] = "float32",
    quantize: Annotated[
        str | None,
        typer.Option(
            help="Weights of linear layers, not of experts: int8, or int4 in groups of 32.", show_default="in --dtype"
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(help="Devices that share the model: tp=4, or ep=2,tp=4.", show_default="one device"),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(help="Codec of keys and values: int8, float8_e4m3fn, float8_e5m2 or int4.", show_default="none"),
    ] = None,
    pooling: Annotated[
        str | None,
        typer.Option(
            help="What of a text is its embedding: last, its last token, or mean, all tokens.",
            show_default="as the checkpoint says, or last",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(help="Requests that run at a time.")] = 16,
    pages: Annotated[int, typer.Option(help="Pages of all requests together.")] = 1024,
    page_size: Annotated[int, typer.Option(help="Tokens per page.")] = 16,
    max_length: Annotated[int, typer.Option(help="Most tokens of a request, prompt included.")] = 2048,
    max_waiting: Annotated[int, typer.Option(help="Most requests that wait; more get status 429.")] = 256,
    chunks: Annotated[
        list[int] | None,
        typer.Option(help="Tokens per step, each a program; may be repeated.", show_default="64, 256"),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on; 0 for any free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key that clients must send; may be repeated. In the variable, spaces separate keys.",
            envvar=KEYS,
            show_envvar=True,
            show_default="anyone may call",
        ),
    ] = None,
    client_answers: Annotated[
        int | None, typer.Option(min=1, help="Most answers of a client at a time.", show_default="no limit")
    ] = None,
    client_calls: Annotated[
        int | None, typer.Option(min=1, help="Most calls of a client per minute.", show_default="no limit")
    ] = None,
    client_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens of a client per minute, prompts included.", show_default="no limit"),
    ] = None,
    no_prefix_sharing: Annotated[
        bool, typer.Option("--no-prefix-sharing", help="Compute every prompt from its first token.")
    ] = False,
    compilation_cache: Annotated[
        str | None,
        typer.Option(
            help="The folder of compiled programs, or 'off'.", show_default=f"${VARIABLE}, or {default_folder()}"
        ),
    ] = None,
) -> None:
    """Serve SmolLM2-135M-Instruct, or a checkpoint, in the API of OpenAI's clients.

    Exits with 0 after a signal, with 1 if the engine failed, with 2 if the model can't be served, with 130 if it was
    interrupted before it served.
    """
    try:
        from attnops_caches import Quantized
        from attnops_lm.serve import Engine, load_model
        from attnops_lm.serve.keys import check_keys
        from attnops_lm.serve.limits import Limits
        from attnops_lm.serve.loading import parse_mesh
        from attnops_lm.serve.pooling import check_pooling, pooling_of
        from attnops_lm.serve.process import serve
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("attnops", "attnops_lm"):
            raise
        fail(f"attnops serve needs {error.name}, which is not installed: pip install 'attnops-lm[serve]'", 2)
    keep_programs(compilation_cache)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            if KEYS in os.environ and not api_key:
                fail(f"{KEYS} is set but has no key; unset it, or give keys", 2)
            check_keys(api_key or [])
            devices = parse_mesh(mesh) if mesh is not None else None
            pooling = pooling_of(checkpoint) if pooling is None else pooling
            check_pooling(pooling)
            model, tokenizer = load_model(checkpoint, operation, dtype, quantize, devices)
            engine = Engine(
                model, tokenizer, rows=rows, pages=pages, page_size=page_size, max_length=max_length,
                chunks=chunks or [64, 256], max_waiting=max_waiting, prefix_sharing=not no_prefix_sharing,
                codec=Quantized(codec) if codec else None, pooling=pooling,
            )  # fmt: skip
        except (FileNotFoundError, ModuleNotFoundError, PluginError, ValueError) as error:
            fail(error, 2)
        engine.warm()
        limits = Limits(client_answers, client_calls, client_tokens)
        raise typer.Exit(serve(engine, name, host=host, port=port, api_keys=api_key or [], limits=limits))
    raise typer.Exit(130)
