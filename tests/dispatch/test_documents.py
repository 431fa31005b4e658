"""The layout "THD": each document is a sequence of its own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnops
from attnops import OperationMetadata, OperationRegistry
from attnops.biases import ALiBi, ScoreFn, alibi_slopes
from attnops.dispatch.documents import documents, mask_by_document
from attnops.masks import Ancestors, Causal, Chunked, Coverage, MaskFn, Segments, SlidingWindow, block_map
from attnops_testing import oracle

H, K, D = 4, 2, 8
# One document without queries, one without keys, one with more queries than keys, one with fewer; padding after them.
Q_LENGTHS, KV_LENGTHS = [5, 0, 4, 6, 1], [5, 3, 0, 2, 9]
CU_Q, CU_K = (np.concatenate([[0], np.cumsum(x)]) for x in (Q_LENGTHS, KV_LENGTHS))
T, S = int(CU_Q[-1]) + 3, int(CU_K[-1]) + 2
THD = OperationMetadata(layout="THD")


def arrays(T=T, S=S, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(n, h, D)).astype(np.float32) for n, h in ((T, H), (S, K), (S, K)))


def masks_and_biases():
    """By name: mask, bias, and what a document [T, S] of them allows and adds."""

    def grid(T, S):
        return np.arange(T)[:, None] + S - T, np.arange(S)[None]

    def near(T, S):
        q, kv = grid(T, S)
        return (kv >= q - 2) & (kv <= q + 1), -alibi_slopes(H)[:, None, None] * abs(q - kv)

    def chunks(T, S):
        q, kv = grid(T, S)
        first = np.arange(T)[:, None]  # functions have no offset
        return (q // 2 == kv // 2) | ((first + kv) % 3 == 0), np.broadcast_to((first + 2.0 * kv) % 5, (H, T, S))

    def start(T, S):
        return np.arange(T)[:, None] + 1 >= np.arange(S)[None], np.zeros((H, T, S))

    return {
        "window, ALiBi": (SlidingWindow(2, 1), ALiBi(alibi_slopes(H)), near),
        "functions": (
            Chunked(2) | MaskFn(lambda b, h, q, kv: (q + kv) % 3 == 0),
            ScoreFn(lambda s, b, h, q, kv: s + ((q + 2 * kv) % 5).astype(s.dtype)),
            chunks,
        ),
        "offset": (Causal(offset=1), None, start),
    }


def by_document(query, key, value, d_out, cu_q, cu_k, expected):
    """Output, logsumexp and gradients, each document computed alone; what is padding has 0 and −inf."""
    out, lse = np.zeros(query.shape), np.full((H, len(query)), -np.inf)
    grads = [np.zeros(x.shape) for x in (query, key, value)]
    for q, kv in zip(map(slice, cu_q, cu_q[1:]), map(slice, cu_k, cu_k[1:]), strict=True):
        qkv = [x[None] for x in (query[q], key[kv], value[kv])]
        if 0 in (qkv[0].size, qkv[1].size):
            continue
        visible, bias = expected(qkv[0].shape[1], qkv[1].shape[1])
        options = {"mask": visible[None, None], "bias": bias[None]}
        result = oracle.attention(*qkv, **options)
        out[q], lse[:, q] = result.out[0], result.logsumexp[0]
        d = oracle.attention_gradients(*qkv, d_out=d_out[None, q], **options).values
        for into, name, where in zip(grads, ("query", "key", "value"), (q, kv, kv), strict=True):
            into[where] = d[name][0]
    return out, lse, grads


@pytest.mark.parametrize("name", masks_and_biases())
@pytest.mark.tier(quick=["window, ALiBi"])
def test_each_document_is_a_sequence_of_its_own(name):
    mask, bias, expected = masks_and_biases()[name]
    query, key, value = arrays()
    d_out = np.random.default_rng(1).normal(size=query.shape).astype(np.float32)
    flash = OperationRegistry.create("flash", THD)

    @jax.jit
    def run(qkv, d_out, cu_q, cu_k):
        def attend(*qkv):
            out = flash(*qkv, mask=mask, bias=bias, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True)
            return out.attention_outputs, out.logsumexp

        out, pull_back, lse = jax.vjp(attend, *qkv, has_aux=True)
        return out, lse, pull_back(d_out)

    # With other documents the program is the same; NaN in padding is not read.
    for cu_q, cu_k in ((CU_Q, CU_K), (CU_Q[[0, 1, 3, 3, 4, 4]], CU_K[[0, 2, 2, 4, 5, 5]])):
        padded = [np.array(x) for x in (query, key, value)]
        for x, end in zip(padded, (cu_q[-1], cu_k[-1], cu_k[-1]), strict=True):
            x[end:] = np.nan
        got = run(padded, d_out, cu_q.astype(np.int32), cu_k.astype(np.int32))
        want = by_document(query, key, value, d_out, cu_q, cu_k, expected)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), got, (*want[:2], tuple(want[2])))


def jaxpr(f, *args):
    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(f)(*args)))


def test_its_program_is_that_of_segments_of_one_row():
    query, key, value = (x[:12] for x in arrays())
    mask = Causal() & SlidingWindow(4, 0)
    rows, total = (OperationRegistry.create("flash", metadata) for metadata in (OperationMetadata(), THD))
    ends = np.array([0, 5, 12], np.int32)

    def of_segments(q, k, v):
        segments = Segments.from_cu_seqlens(ends, 12)
        return rows(q[None], k[None], v[None], mask=mask & segments).attention_outputs[0]

    def of_total(q, k, v):
        return total(q, k, v, mask=mask, cu_seqlens=ends).attention_outputs

    assert jaxpr(of_total, query, key, value) == jaxpr(of_segments, query, key, value)


def test_a_call_with_traced_documents_is_one_of_segments_of_one_row():
    def calls(q, k, v, ends):
        ids = documents({"cu_seqlens": ends}, 12, 12).segments
        row = rows.prepare(q[None], k[None], v[None], mask=Causal() & ids)
        packed = total.prepare(q, k, v, mask=Causal(), cu_seqlens=ends)
        assert row.request == packed.request
        assert jax.tree.structure((row.args, row.options)) == jax.tree.structure((packed.args, packed.options))
        return ends

    rows, total = (OperationRegistry.create("flash", metadata) for metadata in (OperationMetadata(), THD))
    jax.eval_shape(calls, *(x[:12] for x in arrays()), np.array([0, 5, 12], np.int32))


def test_tiles_of_other_documents_are_skipped():
    ends = np.arange(0, 129, 32)
    for placed in (
        documents({"cu_seqlens": ends}, 128, 128),
        documents({"cu_seqlens_q": ends, "cu_seqlens_k": ends.copy()}, 128, 128),
    ):
        coverage = block_map(mask_by_document(Causal(), placed), (1, 1, 128, 128), 16, 16)
        assert coverage.count(Coverage.PARTIAL) == 8
        assert coverage.count(Coverage.FULL) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "layout='THD' with [], but must have cu_seqlens, or both cu_seqlens_q and cu_seqlens_k"),
        ({"cu_seqlens_q": [0, T]}, "layout='THD' with ['cu_seqlens_q'], but must have cu_seqlens, or both"),
        ({"cu_seqlens": [0, T]}, f"query has {T} tokens and key {S}, but one cu_seqlens"),
        ({"cu_seqlens_q": [0, 3, 2], "cu_seqlens_k": [0, 1, 2]}, "cu_seqlens_q=[0, 3, 2] must begin with 0, not decr"),
        ({"cu_seqlens_q": [0, 3], "cu_seqlens_k": [0, S + 1]}, f"cu_seqlens_k=[0, {S + 1}] must begin with 0"),
        ({"cu_seqlens_q": [1, 3], "cu_seqlens_k": [0, 1]}, "cu_seqlens_q=[1, 3] must begin with 0"),
        ({"cu_seqlens_q": [*range(9), 5, 9], "cu_seqlens_k": [0, 1]}, "cu_seqlens_q[8:10]=[8, 5] must begin with 0"),
        ({"cu_seqlens_q": [0, 3], "cu_seqlens_k": [0, 1, 2]}, "cu_seqlens_q has 2 numbers and cu_seqlens_k 3"),
        ({"cu_seqlens_q": [0.0, 3], "cu_seqlens_k": [0, 1]}, "cu_seqlens_q has dtype float64, but must be integers"),
        ({"cu_seqlens_q": [[0, 3]], "cu_seqlens_k": [0, 1]}, "cu_seqlens_q has shape (1, 2), but must have shape"),
        (
            {"cu_seqlens_q": [0, 3], "cu_seqlens_k": [0, 1], "mask": Ancestors(np.full(T, -1))},
            "is a tree of one sequence, but layout='THD' has documents",
        ),
        (
            {"cu_seqlens_q": [0, 3], "cu_seqlens_k": [0, 1], "mask": Causal(offset=np.zeros((1, H), np.int32))},
            f"Causal's offset has shape (1, {H}), but must be a number with layout='THD'",
        ),
    ],
    ids=str,
)
def test_what_is_not_cumulative_is_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        OperationRegistry.create("flash", THD).request(*arrays(), **options)


def test_layouts_are_not_confused():
    rows = OperationRegistry.create("flash", OperationMetadata())
    batch = [x[None] for x in arrays()]
    with pytest.raises(
        ValueError, match=re.escape("cu_seqlens is given, but metadata.layout='BTHD': it is for Operati")
    ):
        rows.request(*batch, cu_seqlens=[0, T])
    with pytest.raises(
        ValueError, match=re.escape(f"query has shape (1, {T}, 4, 8), but must have rank 3 in layout='THD'")
    ):
        OperationRegistry.create("flash", THD).request(*batch, cu_seqlens=[0, T])
    with pytest.raises(ValueError, match="layout='THD' has no batch: ask for shapes"):
        THD.get_shardings(*batch)


def test_traced_numbers_that_decrease_make_empty_documents():
    def ids(ends):
        placed = documents({"cu_seqlens": ends}, 8, 8)
        return placed.segments.q_ids, placed.segments.kv_ids

    q_ids, kv_ids = jax.jit(ids)(jnp.array([0, 5, 3, 99]))
    np.testing.assert_array_equal(q_ids, [1] * 5 + [3] * 3)
    np.testing.assert_array_equal(kv_ids, q_ids)
    q_ids, kv_ids = jax.jit(ids)(jnp.array([2, 5, 3, 6]))
    np.testing.assert_array_equal(q_ids, [-1, -1, 1, 1, 1, 3, -1, -1])
    np.testing.assert_array_equal(kv_ids, [-2, -2, 1, 1, 1, 3, -2, -2])


def test_the_function_of_all_operations_has_documents():
    query = jax.ShapeDtypeStruct((12, H, D), jnp.float32)

    def attend(query, ends):
        return attnops.attention(query, query, query, causal=True, cu_seqlens=ends, metadata=THD)

    ends = jax.ShapeDtypeStruct((3,), jnp.int32)
    assert jax.eval_shape(attend, query, ends).shape == (12, H, D)
    many = jax.eval_shape(jax.vmap(attend), *(jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in (query, ends)))
    assert many.shape == (2, 12, H, D)


def test_shapes_of_logsumexp_weights_and_largest_scores():
    out = jax.eval_shape(
        lambda *qkv: OperationRegistry.create("vanilla", THD)(
            *qkv, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, return_lse=True, return_weights=True, return_max_logits=True
        ),
        *arrays(),
    )
    assert out.logsumexp.shape == out.max_logits.shape == (H, T)
    assert out.attention_weights.shape == (H, T, S)


@pytest.mark.slow
def test_it_is_exported_with_a_symbolic_number_of_tokens_and_documents():
    (total, documents) = jax.export.symbolic_shape("total, documents")

    def attend(query, ends):
        return attnops.attention(query, query, query, causal=True, cu_seqlens=ends, metadata=THD, mode="train")

    exported = jax.export.export(jax.jit(attend))(
        jax.ShapeDtypeStruct((total, H, D), jnp.float32), jax.ShapeDtypeStruct((documents,), jnp.int32)
    )
    query, ends = arrays()[0], CU_Q.astype(np.int32)
    np.testing.assert_allclose(exported.call(query, ends), attend(query, ends), atol=1e-5)
