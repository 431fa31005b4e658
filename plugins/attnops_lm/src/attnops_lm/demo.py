"""SmolLM2 answers a question with every operation, over every cache.

The first operation answers over every cache, the others over dense ones. The answer of transformers to the same
question is stored in ``reference.npz``; each token is predicted from the tokens that transformers chose before it, so
that equal predictions mean an equal answer.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import attnops
from attnops_caches import Quantized
from attnops_lm.caching import with_table
from attnops_lm.compilation import keep_programs
from attnops_lm.gguf_file import load_smollm2
from attnops_lm.installed import attention_operations
from attnops_lm.model import Caches, CausalLM

REFERENCE = Path(__file__).with_name("reference.npz")
N, PAGE = 48, 16  # tokens of the answer, and slots per page
REFUSALS = (attnops.UnsupportedError, attnops.PluginError, attnops.AmbiguousOperationError)
# By codec, how far the mean log likelihood of transformers' answer may differ from transformers' own value. In float32
# all N tokens must also be the same.
TOLERANCE = {"": 1e-4, "int8": 0.02}


class DemoResult(NamedTuple):
    """The result of one operation over one kind of cache."""

    operation: str
    cache: str
    text: str
    same: int  # the number of tokens that equal transformers'
    likelihood: float  # the mean log likelihood of transformers' tokens
    nbytes: int  # of the caches of all layers
    tokens_per_second: float


class PendingAnswer(NamedTuple):
    """`answer` for one operation and one kind of cache, while it is being compiled."""

    operation: str
    cache: str
    arguments: list[Any]
    compiled: futures.Future[Any]


def make_caches(model: CausalLM, length: int) -> dict[str, Callable[[], Caches]]:
    """Functions that make empty caches for one row, by name."""

    def paged(codec: Quantized | None) -> Caches:
        pages = -(-length // PAGE)
        sizes: dict[str, Any] = {"page_size": PAGE, "max_model_length": length, "pages": pages, "codec": codec}
        caches, pool = model.init_ragged_pages(**sizes)
        return with_table(caches, pool.reserve(jnp.array([length])).table)

    return {
        "dense": lambda: model.init_cache(1, length),
        f"pages of {PAGE}": lambda: paged(None),
        f"pages of {PAGE}, int8": lambda: paged(Quantized("int8")),
    }


@functools.partial(jax.jit, static_argnames="graphdef")
def answer(
    graphdef: Any, state: Any, caches: Caches, prompt: jax.Array, given: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The model's prediction after each of the given tokens.

    Args:
        graphdef: the graphdef of the model.
        state: the state of the model.
        caches: empty, for one row.
        prompt: int32 [P].
        given: int32 [N], the answer.

    Returns:
        The tokens that the model prefers, int32 [N], and the log likelihood of those given, float32 [N].
    """

    def step(caches: Caches, token: jax.Array) -> tuple[Caches, jax.Array]:
        out = nnx.merge(graphdef, state)(token[None, None], past_key_values=caches)
        return out.past_key_values, jax.nn.log_softmax(out.logits[0, 0])

    # One token at a time, in the prompt too, so that only one program is compiled.
    _, scores = jax.lax.scan(step, caches, jnp.concatenate([prompt, given[:-1]]))
    scores = scores[len(prompt) - 1 :]
    return scores.argmax(-1), jnp.take_along_axis(scores, given[:, None], axis=1)[:, 0]


def run(console: Console | None = None, operations: Sequence[str] | None = None) -> int:
    """Run the demonstration and return an exit status. Compiled programs are kept on disk, by `keep_programs`.

    Args:
        console: where to print. None: standard output.
        operations: names of operations. None: all that are installed and compute attention.

    Returns:
        0 if at least one operation ran, all that ran agree with transformers, and none failed; otherwise 1. An
        operation that refuses does not count as failed, unless ``operations`` names it.

    Raises:
        ModuleNotFoundError: the weights are not installed.
        UnknownOperationError: ``operations`` has a name that no installed distribution has.
    """
    console = Console() if console is None else console
    keep_programs()
    names = attention_operations() if operations is None else list(operations)
    reference = dict(np.load(REFERENCE))
    results: list[DemoResult] = []
    programs: list[PendingAnswer] = []
    failed = False
    loaded = None

    @contextlib.contextmanager
    def shown(name: str) -> Iterator[None]:
        """Show why an operation does not run, and go on with the others. If it is broken, the exit status is 1."""
        nonlocal failed
        try:
            yield
        except (attnops.UnknownOperationError, ModuleNotFoundError):
            raise
        except REFUSALS as error:
            failed |= operations is not None
            console.print(f"{escape(name)} [yellow]did not run:[/] {escape(str(error))}")
        except Exception as error:
            failed = True
            console.print(f"{escape(name)} [bold red]failed:[/] {escape(f'{type(error).__name__}: {error}')}")

    # Compilation needs most of the time, on one core per program: compile several at once while others are traced.
    with futures.ThreadPoolExecutor() as pool:
        for name in names:
            with shown(name):
                attnops.OperationRegistry.get(name)
                if loaded is None:
                    loaded, tokenizer = load_smollm2(operation="vanilla")
                    console.print(f"SmolLM2-135M-Instruct, float32, asked: {reference['question']}")
                model = with_operation(loaded, name)
                caches = make_caches(model, len(reference["prompt"]) + N)
                for label in caches if not programs else list(caches)[:1]:
                    graphdef, *arguments = arguments_of(model, caches[label], reference)
                    lowered = answer.lower(graphdef, *arguments)
                    programs.append(PendingAnswer(name, label, arguments, pool.submit(lowered.compile)))
    for program in programs:
        with shown(program.operation):
            results.append(_measure(program, reference, tokenizer.decode))
    if results:
        console.print(escape(results[0].text), style="italic")
        console.print(_table(results, reference))
    return int(failed or not results or not all(_agrees(result, reference) for result in results))


def with_operation(model: CausalLM, name: str, **metadata: Any) -> CausalLM:
    """A model with the same weights, which are not copied, and another operation."""
    given = attnops.OperationMetadata(on_unsupported="error", **metadata)
    other = CausalLM.lazy_init(model.config, operation=name, metadata=given)
    nnx.update(other, nnx.state(model))
    return other


def arguments_of(model: CausalLM, make: Callable[[], Caches], reference: dict[str, np.ndarray]) -> tuple[Any, ...]:
    """The arguments of `answer`."""
    graphdef, state = nnx.split(model)
    return graphdef, state, make(), jnp.asarray(reference["prompt"]), jnp.asarray(reference["generated"][:N])


def _measure(program: PendingAnswer, reference: dict[str, np.ndarray], decode: Any) -> DemoResult:
    compiled = program.compiled.result()
    start = time.perf_counter()
    tokens, likelihood = jax.block_until_ready(compiled(*program.arguments))
    seconds = time.perf_counter() - start
    _, caches, prompt, given = program.arguments
    return DemoResult(
        program.operation, program.cache, decode(np.asarray(tokens).tolist()),
        int((np.asarray(tokens) == np.asarray(given)).sum()), float(likelihood.mean()),
        sum(x.nbytes for x in jax.tree.leaves(caches)), (len(prompt) + N - 1) / seconds,
    )  # fmt: skip


def _agrees(result: DemoResult, reference: dict[str, np.ndarray]) -> bool:
    codec = "int8" if "int8" in result.cache else ""
    expected = float(reference["likelihood"][:N].mean())
    return abs(result.likelihood - expected) <= TOLERANCE[codec] and (bool(codec) or result.same == N)


def _table(results: Sequence[DemoResult], reference: dict[str, np.ndarray]) -> Table:
    table = Table(
        title="A language model",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        caption=f"A line agrees if the mean log likelihood of transformers' answer differs by at most "
        f"{TOLERANCE['']:g} ({TOLERANCE['int8']:g} in int8) from that in transformers and, without a codec, all {N} "
        f"tokens are the same. MB is the size of the caches of all layers.",
        caption_justify="left",
    )
    for header in ("operation", "cache", "agrees"):
        table.add_column(header)
    for header in ("same tokens", "log likelihood", "MB", "tokens/s"):
        table.add_column(header, justify="right", no_wrap=True)
    expected = float(reference["likelihood"][:N].mean())
    table.add_row("transformers", "", "", "", f"{expected:.4f}", "", "")
    for r in results:
        table.add_row(
            escape(r.operation), r.cache, "[green]yes[/]" if _agrees(r, reference) else "[bold red]no[/]",
            f"{r.same}/{N}", f"{r.likelihood:.4f}", f"{r.nbytes / 1e6:.2f}", f"{r.tokens_per_second:.1f}",
        )  # fmt: skip
    return table
