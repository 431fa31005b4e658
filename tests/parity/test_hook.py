"""The masks that `attnops_adapters.transformers` makes of transformers' mask functions, and what it refuses."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from program_budget import compiled
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_compatibility_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)
from transformers_models import ARCHITECTURES, left_padded

from attnops_adapters import torch_call
from attnops_adapters.buckets import bucket, bucket_lengths
from attnops_adapters.torch_arrays import to_jax, to_torch
from attnops_adapters.transformers import attend_with, attention, register
from attnops_adapters.transformers_masks import ExpressionTensor, create_mask

B, TOKENS = 2, 12
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8]])
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 3 + [1] * 9])
PREFIX = torch.tensor([[0] * 4 + [-1] * 8, [0] * 7 + [-1] * 5])
IMAGES = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1, -1, -1, -1], [0, 0, -1, -1, -1, -1, -1, 1, 1, 1, 1, -1]])
STARTS = torch.tensor([0, 3])


def every_third(b, h, q, kv):
    return kv % 3 == 0


def by_token(b, h, q, kv):
    return DOCUMENTS[b, q] <= DOCUMENTS[b, kv]


packed = functools.partial(
    packed_sequence_compatibility_function, position_ids=POSITIONS, packed_sequence_mask=DOCUMENTS
)

# Functions, and the kinds of the masks that they become.
FUNCTIONS = {
    "causal": (causal_mask_function, {"Causal"}),
    "all": (bidirectional_mask_function, {"Full"}),
    "window": (sliding_window_causal_mask_function(4), {"Causal", "SlidingWindow"}),
    "window both ways": (sliding_window_bidirectional_mask_function(3), {"Full", "SlidingWindow"}),
    "chunks": (chunked_causal_mask_function(5, STARTS), {"Causal", "Chunked", "at"}),
    "prefix": (or_masks(causal_mask_function, blockwise_overlay(PREFIX)), {"PrefixLM"}),
    "images": (or_masks(causal_mask_function, blockwise_overlay(IMAGES)), {"Causal", "Segments"}),
    "images in a window": (
        and_masks(or_masks(causal_mask_function, blockwise_overlay(IMAGES)), sliding_window_overlay(4)),
        {"Causal", "Segments", "SlidingWindow"},
    ),
    "packed": (packed(causal_mask_function), {"Causal", "Segments", "at"}),
    "packed window": (
        packed(sliding_window_causal_mask_function(3)),
        {"Causal", "SlidingWindow", "Segments", "at"},
    ),
    "a caller's own": (and_masks(causal_mask_function, every_third), {"Causal", "Dense"}),
    "a caller's own of tokens, packed": (packed(and_masks(causal_mask_function, by_token)), {"Segments", "Dense"}),
}
# Queries and keys as ranges of tokens: all; those after a cache; a cache of a window, which dropped the first keys.
RANGES = [(range(TOKENS), range(TOKENS)), (range(9, TOKENS), range(TOKENS)), (range(9, TOKENS), range(5, TOKENS))]


@pytest.mark.parametrize(("q", "kv"), RANGES, ids=["all", "cache", "window cache"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_expression_is_the_function(name: str, q: range, kv: range) -> None:
    function, kinds = FUNCTIONS[name]
    if name == "prefix" and len(q) < TOKENS:
        kinds = {"Causal", "Segments"}  # which also holds for queries after a cache
    is_token = torch.arange(TOKENS) >= STARTS[:, None]
    grid = (B, len(q), len(kv), q.start, kv.start, function)
    mask = create_mask(*grid, is_token).mask
    assert mask.kinds() - {"&", "|"} == kinds | {"KeyPadding"}
    expected = masking_utils.sdpa_mask(*grid, is_token, allow_is_causal_skip=False, use_vmap=True)
    actual = mask.bind(B, 1, len(q), len(kv)).dense(B, 1, len(q), len(kv))
    np.testing.assert_array_equal(np.broadcast_to(actual, expected.shape), expected.numpy())


@pytest.mark.parametrize(("q", "kv"), [*RANGES, (range(11, TOKENS), range(TOKENS))])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_padded_mask_is_the_mask_and_hides_the_padding(name: str, q: range, kv: range, is_padded: bool) -> None:
    T, S = len(q), len(kv)
    given = torch.arange(TOKENS) >= STARTS[:, None] if is_padded else None
    tensor = create_mask(B, T, S, q.start, kv.start, FUNCTIONS[name][0], given)
    T_, S_ = bucket_lengths(T, S)
    actual = np.broadcast_to(tensor.padded(B, 1).dense(B, 1, T_, S_), (B, 1, T_, S_))[:, :, :T]
    np.testing.assert_array_equal(actual[..., :S], np.broadcast_to(tensor.mask.dense(B, 1, T, S), (B, 1, T, S)))
    assert not actual[..., S:].any()


@pytest.mark.parametrize(("length", "padded"), [(1, 1), (2, 2), (3, 4), (33, 64), (65, 128), (500, 512), (1025, 1152)])
def test_lengths_are_padded_by_an_eighth_at_most_once_they_are_long(length: int, padded: int) -> None:
    assert bucket(length) == padded


def test_generating_and_training_compile_a_program_for_a_bucket() -> None:
    """A growing cache has as many keys as tokens so far, and each batch of a training loop another length."""
    model = ARCHITECTURES["llama"].build()
    register("attnops", attend_with())
    model.set_attn_implementation("attnops")
    ids = left_padded()["input_ids"][:1, :10]
    forward, training, backward = torch_call._forward, torch_call._forward_for_backward, torch_call._backward
    for function in (forward, training, backward):
        function.clear_cache()
    before = compiled()
    model.generate(ids, max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None)
    assert (forward._cache_size(), compiled() - before) == (3, 3)  # the prompt, up to 64 keys, and up to 128
    before = compiled()
    for length in (10, 9):
        model(ids[:, :length], labels=ids[:, :length]).loss.backward()
    assert (training._cache_size(), backward._cache_size(), compiled() - before) == (1, 1, 2)


def test_a_mask_has_a_shape_but_no_values() -> None:
    mask = create_mask(B, 3, TOKENS, 9)
    assert isinstance(mask, ExpressionTensor)
    assert mask.shape == (B, 1, 3, TOKENS)
    assert mask.untyped_storage().nbytes() == 1
    assert mask.to("cpu") is mask
    for read in (lambda: mask[:, :, :, :4], mask.all, lambda: ~mask, mask.float):
        with pytest.raises(TypeError, match="pass the mask on unchanged"):
            read()


REFUSED = [
    {"output_attentions": True},
    {"cache": object()},
    {"attention_mask": torch.zeros(1, 1, 1, 1)},
    {"attention_mask": create_mask(1, 1, 2)},
    {"sliding_window": 0, "is_causal": False},
    {"sinks": torch.zeros(1)},
    {"indices": torch.zeros(1)},
    {"scaling": torch.nn.Parameter(torch.ones(()))},
    {"query": torch.zeros(1, 1, 1, 4, dtype=torch.float64)},
]


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: next(iter(refused)))
def test_what_is_not_served_raises(refused: dict) -> None:
    query = torch.zeros(1, 1, 1, 4)
    arguments = {"attention_mask": None, "query": query, "key": query, "value": query} | refused
    with pytest.raises(ValueError, match=r"must|needs a causal layer"):
        attention(attend_with(), torch.nn.Module(), **arguments)


@pytest.mark.parametrize(("is_causal", "last"), [(True, 0.0), (False, 1.0), (None, 0.0)])
def test_without_a_mask_the_layer_says_whether_it_is_causal(is_causal: bool | None, last: float) -> None:
    layer = torch.nn.Module()
    layer.is_causal = True
    value = torch.tensor([0.0, 2.0]).reshape(1, 1, 2, 1)
    query = torch.zeros_like(value)
    out, weights = attention(attend_with(), layer, query, query, value, None, is_causal=is_causal)
    assert weights is None
    assert out[0, 0, 0, 0] == last  # the first query sees the last key, or does not


def test_an_array_mask_is_used() -> None:
    value = torch.tensor([0.0, 2.0]).reshape(1, 1, 2, 1)
    query = torch.zeros_like(value)
    mask = torch.tensor([[False, True], [True, True]])[None, None]
    out, _ = attention(attend_with(), torch.nn.Module(), query, query, value, mask)
    assert out.flatten().tolist() == [2.0, 1.0]


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_without_a_mask_a_causal_layer_has_its_window(window: int) -> None:
    value = torch.eye(4)[None, None]
    out, _ = attention(
        attend_with(), torch.nn.Module(), torch.zeros_like(value), torch.zeros_like(value), value, None,
        sliding_window=window,
    )  # fmt: skip
    i, j = torch.arange(4)[:, None], torch.arange(4)
    assert torch.equal(out[0, :, 0] > 0, (j <= i) & (j > i - window))


def test_dropout_is_of_its_rate_and_of_pytorchs_seed() -> None:
    value = torch.eye(60).expand(2, 3, 60, 60)
    query = torch.zeros(2, 3, 60, 8)

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        out, _ = attention(attend_with(), torch.nn.Module(), query, query, value, None, dropout=0.25, is_causal=False)
        return out

    weights = run(0)
    kept = weights > 0
    assert abs(float(kept.float().mean()) - 0.75) < 0.02
    torch.testing.assert_close(weights[kept], torch.full_like(weights[kept], 1 / 60 / 0.75))
    assert torch.equal(run(0), weights)
    assert not torch.equal(run(1), weights)


def test_a_name_a_function_and_metadata_can_be_registered() -> None:
    with pytest.raises(ValueError, match="flsh"):
        register("attnops", "flsh")
    with pytest.raises(ValueError, match=r"metadata.*block_q.*function"):
        register("attnops", attend_with(), block_q=8)
    register("attnops", "flash", block_q=8, block_k=8)
    register()


def test_bfloat16_is_served() -> None:
    value = torch.arange(32.0).reshape(1, 1, 4, 8).to(torch.bfloat16).requires_grad_()
    out, _ = attention(attend_with(), torch.nn.Module(), value, value, value, None, is_causal=True)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out[0, 0], value[0, :, 0])
    out.sum().backward()
    assert value.grad.dtype == torch.bfloat16


def test_a_second_derivative_raises() -> None:
    x = torch.ones(1, 1, 2, 4, requires_grad=True)
    out, _ = attention(attend_with(), torch.nn.Module(), x, x, x, None)
    (gradient,) = torch.autograd.grad((out**2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_bias_of_fewer_dimensions_has_a_gradient_of_its_own_shape() -> None:
    x, whole = torch.linspace(-1, 1, 20).reshape(1, 1, 5, 4), torch.linspace(0, 1, 25).reshape(1, 1, 5, 5)
    gradients = []
    for bias in (whole, whole[0], whole[0, 0]):
        bias = bias.clone().requires_grad_()
        out, _ = attention(attend_with(), torch.nn.Module(), x, x, x, None, position_bias=bias)
        (out**2).sum().backward()
        assert bias.grad.shape == bias.shape
        gradients.append(bias.grad.reshape(whole.shape))
    assert gradients[0].abs().max() > 1e-3
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_masks_pass_through_what_models_do_and_nothing_reads_them() -> None:
    mask = create_mask(1, 2, 2)
    for same in (mask.contiguous(), mask.detach(), mask.to(torch.bool), mask.to("cpu")):
        assert same is mask
    assert mask.shape == (1, 1, 2, 2)
    for read in (mask.item, mask.tolist, mask.numpy, mask.clone, lambda: bool(mask), lambda: mask[0], lambda: mask + 0,
                 lambda: mask.to(torch.float32), lambda: np.asarray(mask), lambda: list(mask)):  # fmt: skip
        with pytest.raises(TypeError):
            read()


def test_tensors_share_no_memory_with_arrays() -> None:
    """PyTorch writes to tensors in place, and JAX's arrays never change."""
    tensor = torch.zeros(64, 64)
    array = to_jax(tensor)
    tensor.add_(1.0)
    assert jnp.all(array == 0)
    to_torch(array).add_(1.0)
    assert jnp.all(array == 0)


def test_decoding_over_transformers_own_cache() -> None:
    """A prompt and then token by token: more keys than queries, and windows whose first keys are dropped."""
    model, inputs = ARCHITECTURES["gemma2"].build(), left_padded()
    register("attnops", attend_with())
    runs = []
    for implementation in ("eager", "attnops"):
        model.set_attn_implementation(implementation)
        options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
        outputs = {"output_logits": True, "return_dict_in_generate": True}
        runs.append(model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **options, **outputs))
    assert torch.equal(runs[0].sequences, runs[1].sequences)
    for expected, actual in zip(runs[0].logits, runs[1].logits, strict=True):
        assert float((actual - expected).abs().max()) <= 2e-5
