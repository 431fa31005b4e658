"""Servers of SmolLM2-135M on a CPU under load: `attnops serve`, `transformers serve` and llama.cpp's server.

Run ``python benchmarks/server.py --vllm BIN`` (``--json FILE`` keeps the figures, and continues them) on an idle
machine. ``BIN`` is the folder of ``vllm``, whose ``vllm bench serve`` is the load generator (`pip install vllm`, in an
environment of its own). Peers run if they are given: ``--transformers BIN`` (`pip install transformers[serving]`; the
folder may be the same) and ``--llama PYTHON``, an interpreter with xllamacpp, which has llama.cpp's server.

All have the same weights, dequantised from GGUF once, in float32, and in 4 bits where a server has these. The same
prompts come from ``--clients`` clients, each of which waits for its answer. Answers are greedy and end at
``--tokens``. Each server is warmed with some requests, measured, and ended before the next one starts.
`transformers serve` sends its first event before it has a token, so that the time of its first token says nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import gguf
import httpx
from rich.console import Console
from rich.table import Table

from attnops_lm.gguf_file import load_smollm2, smollm2_path
from attnops_testing.bench import describe_machine

WORDS = ("sea", "fox", "winter", "bread", "moon", "violin", "rain", "chess", "bridge", "river", "stone", "garden")

LLAMA = """
import sys, time, xllamacpp
given = xllamacpp.CommonParams()
given.model.path = sys.argv[1]
given.port, given.n_parallel, given.n_ctx = map(int, sys.argv[2:])
given.model_alias = {"model"}
server = xllamacpp.Server(given)
time.sleep(1e6)
"""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A server: its name, what its weights are stored in, its command, and its model's name."""

    name: str
    weights: str
    command: Sequence[str]
    model: str


def contenders(given: argparse.Namespace, folder: Path) -> Iterator[Contender]:
    """The servers, each on ``given.port``; their weights are written to ``folder``."""
    own = [
        str(Path(sys.executable).with_name("attnops")), "serve", "--port", str(given.port), "--name", "model",
        "--rows", str(given.clients), "--max-length", str(given.context), "--no-prefix-sharing",
    ]  # fmt: skip
    yield Contender("attnops serve", "float32", own, "model")
    yield Contender("attnops serve", "int4", [*own, "--quantize", "int4"], "model")
    if given.transformers is not None:
        model = str(folder / "model")
        serve = [
            str(given.transformers / "transformers"), "serve", model, "--device", "cpu", "--dtype", "float32", "--port",
            str(given.port),
        ]  # fmt: skip
        yield Contender("transformers serve", "float32", serve, model)
        batching = [*serve, "--continuous-batching", "--attn-implementation", "sdpa"]
        yield Contender("transformers serve, continuous batching", "float32", batching, model)
    if given.llama is not None:
        write_float32(smollm2_path(), folder / "model.gguf")
        for weights, path in (("float32", folder / "model.gguf"), ("Q4_1", smollm2_path())):
            sizes = [str(given.port), str(given.clients), str(given.clients * given.context)]
            yield Contender("llama.cpp's server", weights, [str(given.llama), "-c", LLAMA, str(path), *sizes], "model")


def write_float32(path: Path, to: Path) -> None:
    """Write a copy of a GGUF file whose weights are float32."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(to, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kinds = field.types
        value = 0 if name == "general.file_type" else field.contents()
        writer.add_key_value(name, value, kinds[0], kinds[-1] if kinds[0] == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        weights = gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32")
        writer.add_tensor(tensor.name, weights.reshape(tuple(reversed(tensor.shape.tolist()))))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def prompts(given: argparse.Namespace, path: Path) -> None:
    """Write different prompts of some ``given.words`` words."""
    generator = random.Random(0)
    with path.open("w") as file:
        for i in range(given.requests):
            text = " ".join(generator.choices(WORDS, k=given.words))
            file.write(json.dumps({"prompt": f"{i}. Write a long story with these words: {text}"}) + "\n")


@contextlib.contextmanager
def running(contender: Contender, given: argparse.Namespace, log: Path) -> Iterator[None]:
    """The server, when it answers."""
    with log.open("w") as file:
        environment = os.environ if contender.name == "attnops serve" else others()
        process = subprocess.Popen(contender.command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        for _ in range(600):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{given.port}/health", timeout=10).status_code == 200:
                    break
            if process.poll() is not None:
                raise RuntimeError(f"{contender.command} ended with {process.returncode}:\n{log.read_text()[-2000:]}")
            time.sleep(1)
        yield
    finally:
        process.terminate()
        process.wait(60)


def measure(contender: Contender, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What ``vllm bench serve`` measures of a server."""
    load = [
        str(given.vllm / "vllm"), "bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions",
        "--base-url", f"http://127.0.0.1:{given.port}", "--model", contender.model,
        "--tokenizer", str(folder / "model"), "--dataset-name", "custom", "--skip-chat-template",
        "--dataset-path", str(folder / "prompts.jsonl"), "--custom-output-len", str(given.tokens),
        "--num-prompts", str(given.requests), "--num-warmups", str(given.clients), "--temperature", "0",
        "--max-concurrency", str(given.clients), "--disable-shuffle", "--disable-tqdm",
        "--percentile-metrics", "ttft,tpot,e2el", "--save-result", "--result-filename", str(folder / "result.json"),
    ]  # fmt: skip
    with running(contender, given, folder / "log"):
        subprocess.run(load, check=True, stdout=sys.stderr, env=others() | {"VLLM_LOGGING_LEVEL": "WARNING"})
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    if result["completed"] < 0.9 * given.requests:  # a server may close a connection that a client uses again
        raise RuntimeError(f"{contender.name} answered {result['completed']} of {given.requests} requests")
    return result


def others() -> dict[str, str]:
    """The environment variables of programs that have a virtual environment of their own."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def table(results: list[dict[str, Any]]) -> Table:
    """The figures."""
    columns = {
        "output tokens/s": ("output_throughput", 1), "first token, s": ("mean_ttft_ms", 1e3),
        "99 %": ("p99_ttft_ms", 1e3), "ms a token": ("mean_tpot_ms", 1), "answer, s": ("mean_e2el_ms", 1e3),
        "tokens": ("total_output_tokens", 1), "answers": ("completed", 1),
    }  # fmt: skip
    found = Table("server", "weights", *columns, "of the first")
    for x in results:
        ratio = x["output_throughput"] / results[0]["output_throughput"]
        figures = (f"{x[name] / unit:.{1 if isinstance(x[name], float) else 0}f}" for name, unit in columns.values())
        found.add_row(x["name"], x["weights"], *figures, f"{ratio:.2f}")
    return found


def main() -> None:
    """Measure the servers, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="the folder of vllm's command")
    parser.add_argument("--transformers", type=Path, help="the folder of transformers' command")
    parser.add_argument("--llama", type=Path, help="a Python with xllamacpp")
    parser.add_argument("--requests", type=int, default=48, help="requests in all")
    parser.add_argument("--clients", type=int, default=8, help="requests at a time")
    parser.add_argument("--words", type=int, default=100, help="words of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="the most tokens of an answer")
    parser.add_argument("--context", type=int, default=512, help="the most tokens of a prompt and its answer")
    parser.add_argument("--port", type=int, default=free_port(), help="the port of the servers")
    parser.add_argument("--json", type=Path, help="keep the figures in this file, and measure only what it lacks")
    given = parser.parse_args()
    results = json.loads(given.json.read_text()) if given.json and given.json.exists() else []
    with tempfile.TemporaryDirectory() as name:
        prompts(given, Path(name) / "prompts.jsonl")
        load_smollm2()[0].save_pretrained(Path(name) / "model")
        for contender in contenders(given, Path(name)):
            if any((x["name"], x["weights"]) == (contender.name, contender.weights) for x in results):
                continue
            result = measure(contender, given, Path(name))
            results.append({"name": contender.name, "weights": contender.weights} | result)
            if given.json:
                given.json.write_text(json.dumps(results))
    console = Console(width=150)
    console.print(describe_machine(), f"jax {metadata.version('jax')}", soft_wrap=True)
    console.print(table(results))


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


if __name__ == "__main__":
    main()
