"""`attnops bench --cache`: attention over caches is checked against the tokens, and measured by the bytes that queries
see.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner, Result

import attnops_cli
from attnops import OperationRegistry
from attnops.masks import Causal, Mask, SlidingWindow
from attnops.operations.vanilla import VanillaAttention
from attnops_caches import Cache, DenseCache, PagedCache, Quantized, WindowCache
from attnops_testing.bench import CacheCase, Contender, Tokens, cache_truth, find, measure, ragged, reading

CAUSAL = Causal()
SMALL = ("-B", "2", "-H", "4", "-K", "2", "-D", "8", "--repeats", "2")
pytestmark = pytest.mark.usefixtures("core_alone")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(attnops_cli.make_app(), ["bench", *arguments])


def case(
    lengths: tuple[int, ...] = (20, 11),
    queries: tuple[int, ...] = (3, 2),
    make: Any = lambda **sizes: DenseCache.create(length=32, **sizes),
    mask: Mask | None = CAUSAL,
    packed: bool = False,
    **options: Any,
) -> CacheCase:
    tokens = Tokens(lengths=lengths, queries=queries, slots=32, heads=4, kv_heads=2, head_dim=8, **options)
    sizes = {"batch": len(lengths), "kv_heads": 2, "head_dim": 8, "dtype": tokens.dtype, "latent": tokens.latent}
    cache: Cache = jax.eval_shape(lambda: make(**sizes))
    return CacheCase(tokens=tokens, cache=cache, mask=mask, packed=packed)


def pages(codec: Quantized | None = None, scale: Any = None) -> Any:
    return lambda batch, **sizes: PagedCache.create(
        batch=batch, pages=4 * batch, page_size=8, max_pages=4, codec=codec, key_scale=scale, value_scale=scale, **sizes
    )


# The command


@pytest.mark.slow
def test_bench_measures_calls_over_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    figures = tmp_path / "figures.json"
    options = ("--cache", "PagedCache", "--page-size", "8", "--codec", "int8", "--scales", "head", "--used", "24")
    result = run(
        "flash", "vanilla", "jax.nn", "-T", "32", *SMALL, "--dtype", "bfloat16", *options, "--json", str(figures)
    )
    assert result.exit_code == 0, result.output
    found = {m["name"]: m for m in json.loads(figures.read_text())["measurements"]}
    assert list(found) == ["flash", "vanilla", "jax.nn", "one read", "one read, plain"]
    for name, m in found.items():
        assert (m["status"], len(m["seconds"])) == ("ok", 2), m
        assert (m["cache"], m["page_size"], m["codec"]) == ("PagedCache", 8, "int8 by head")
        assert (m["length"], m["used"], m["queries"], m["tokens_seen"]) == (32, [24, 24], [1, 1], 48)
        assert m["checked_rows"] == (0 if name.startswith("one read") else 2)
        # K · (D + Dv) numbers of 1 byte; peers read 2.
        plain = name in ("jax.nn", "one read, plain")
        assert m["bytes_seen"] == 48 * 2 * 16 * (2 if plain else 1)
    assert found["flash"]["what"].startswith("attnops:flash (forward_native) reads the cache in place (forward_native)")
    assert found["vanilla"]["what"].startswith(
        "attnops:vanilla (forward_native) reads the cache into arrays by cache.read()"
    )
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["dtype", "S", "used", "operation", "best", "median", "GB/s", "of", "read", "memory"] in rows
    assert (
        "\nvanilla: attnops:vanilla (forward_native) reads the cache into arrays by" in result.stdout
    )  # below the table, whose words are whole
    assert [row[0] for row in rows if row[1:2] == ["read"]] == ["one"]
    assert any(row[:3] == ["one", "read,", "plain"] for row in rows)
    shares = [row[row.index("ms", row.index("ms") + 1) + 2] for row in rows if row[:1] == ["one"] and "ms" in row]
    assert shares == ["1.00", "1.00"]


def test_what_is_wrong_over_a_cache_is_not_timed(tmp_path: Path) -> None:
    @functools.wraps(VanillaAttention.forward_native)
    def forward_native(self: Any, query: Any, key: Any, value: Any, **options: Any) -> Any:
        result = VanillaAttention.forward_native(self, query, key.at[:, 3].set(0), value, **options)
        return dataclasses.replace(result)

    body = {
        "get_impl_name": classmethod(lambda cls: "zeta"),
        "__module__": "acme.zeta",
        "forward_native": forward_native,
    }
    OperationRegistry.register(type("Zeta", (VanillaAttention,), body))
    figures = tmp_path / "figures.json"
    result = run("zeta", "-T", "16", *SMALL, "--cache", "DenseCache", "--json", str(figures))
    assert result.exit_code == 1, result.output
    assert "zeta wrong (float32 S=16): output of checked query[" in result.stdout
    assert json.loads(figures.read_text())["measurements"][0]["seconds"] == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--codec", "int8", "--used", "8"), "--codec, --used needs a cache; add --cache PagedCache"),
        (("--cache", "sparse"), "cache='sparse' is unknown; use one of ['DenseCache', 'WindowCache', 'PagedCache']"),
        (("--cache", "DenseCache", "--used", "33", "-T", "32"), "used=33 tokens do not fit in 32 slots per row"),
        (("--cache", "DenseCache", "--queries", "9", "--used", "8"), "queries=9 must be from 1 to used=8"),
        (("--cache", "PagedCache", "-T", "40"), "S=40 must be a multiple of page_size=16"),
        (("--cache", "DenseCache", "--backward"), "--backward is given, but attention over a cache has no gradient"),
        (("--cache", "DenseCache", "--documents", "2"), "--documents is given, but a cache has one sequence per row"),
        (("--cache", "DenseCache", "--ragged"), "batch=1 must be at least 2: one row has one length"),
        (("--cache", "DenseCache", "--dtype", "float8"), "dtype='float8' is unknown"),
        (("--cache", "DenseCache", "--mask", "Segments([0, 1])"), "Segments' q_ids has shape (2,)"),
        (("--cache", "DenseCache", "-K", "3"), "kv_heads=3 must be a divisor of heads=8"),
    ],
)
def test_mistakes_about_caches_are_sentences(arguments: tuple[str, ...], sentence: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


# The library


CASES: dict[str, dict[str, Any]] = {
    "one token": {"queries": (1, 1)},
    "ragged": {"mask": SlidingWindow(4, 0)},
    "whole prompts": {"queries": (20, 11), "packed": True},
    "pages, packed": {"make": pages(), "packed": True, "mask": None},
    "int8 by token and head": {"make": pages(Quantized("int8")), "dtype": "bfloat16"},
    "float8 by tensor": {"make": pages(Quantized("float8_e4m3fn", "tensor"), jnp.zeros(())), "packed": True},
    "latent": {"latent": 4},
    "ring": {"make": lambda **sizes: WindowCache.create(window=6, max_append=3, **sizes), "packed": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.tier(every=4)
def test_operations_and_peers_are_given_the_same_problem_over_a_cache(name: str) -> None:
    own = case(**CASES[name])
    contenders = find(["flash", "vanilla", "jax.nn", "flax.nnx"])
    found = {m.name: m for m in measure([(own, c) for c in contenders], rounds=1, shortest=0)}
    reasons = {m.name: m.reason for m in found.values() if m.status != "ok"}
    latent = "it needs Dv = D, but the value is 4 of 8 features of the key"
    assert reasons == ({"jax.nn": latent, "flax.nnx": latent} if name == "latent" else {})
    assert found["flash"].checked_rows == sum(own.tokens.queries)


def test_tokens_seen_are_those_of_the_mask_and_of_the_ring() -> None:
    assert case().tokens_seen == 20 + 11
    assert case(mask=SlidingWindow(4, 0)).tokens_seen == (4 + 3) + (4 + 2)
    assert case(mask=SlidingWindow(0, 0)).seen(1).tolist() == [
        [[i == 9 for i in range(11)], [i == 10 for i in range(11)]]
    ]
    assert case(**CASES["ring"]).tokens_seen == (5 + 3) + (5 + 2)


@pytest.mark.parametrize("off", [(0, 0), (1, 1)])
def test_an_output_that_is_off_in_one_query_is_wrong(off: tuple[int, int]) -> None:
    own = case()
    truth = own.truth
    exact, allowed = truth._expected
    assert truth.rows.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]]
    assert allowed < 1e-5
    out = np.zeros((2, 3, 4, 8))
    out[truth.rows[:, 0], truth.rows[:, 1]] = exact
    truth.check({"output": out})
    out[off] *= 1.001
    with pytest.raises(AssertionError, match="output of checked query"):
        truth.check({"output": out})


def test_of_a_long_call_some_queries_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = case().truth._expected[0]
    monkeypatch.setattr(cache_truth, "_SCORES", 3 * 4 * 20)
    monkeypatch.setattr(cache_truth, "_ELEMENTS", 1)  # one kv head at once
    truth = case().truth
    assert len(truth.rows) == 3
    assert truth.rows[[0, -1]].tolist() == [[0, 0], [1, 1]]
    np.testing.assert_allclose(truth._expected[0][[0, -1]], whole[[0, -1]], rtol=1e-12)


def test_a_case_over_another_cache_shares_the_oracle_where_it_is_the_same() -> None:
    own = case()
    sizes = {"batch": 2, "kv_heads": 2, "head_dim": 8, "dtype": jnp.float32}
    paged, int8, ring = (
        jax.eval_shape(lambda make=make: make(**sizes))  # type: ignore[misc]
        for make in (pages(), pages(Quantized("int8")), CASES["ring"]["make"])
    )
    assert own.over(paged).truth is own.truth
    assert own.over(int8).truth is not own.truth
    assert own.over(ring).truth is not own.truth


def test_one_read_is_timed_and_not_checked() -> None:
    (found,) = measure([(case(), reading())], rounds=2, shortest=0)
    assert (found.status, found.checked_rows, len(found.seconds)) == ("ok", 0, 2)
    assert found.bytes_seen == (20 + 11) * 2 * 16 * 4
    assert found.bandwidth == found.bytes_seen / min(found.seconds)


def test_what_is_not_over_caches_is_refused() -> None:
    own = dataclasses.replace(case(), memory_limit=1)
    found = measure([(own, find(["vanilla"])[0]), (own, reading())], rounds=1)
    assert [m.status for m in found] == ["refused", "refused"]
    assert found[0].reason.startswith("the cache needs 0.0 GB, more than the limit of 0.0")


def test_ragged_rows_differ_and_the_first_has_all() -> None:
    lengths, counts = ragged(8, 100, 4)
    assert (lengths[0], counts[0]) == (100, 4)
    assert len(set(lengths)) > 4
    assert all(1 <= count <= 4 for count in counts)
    assert all(count <= length <= 100 for length, count in zip(lengths, counts, strict=True))
    assert set(ragged(8, 100, 1)[1]) == {1}


def test_a_timing_over_a_cache_is_one_call() -> None:
    calls: list[str] = []

    def prepare(of: CacheCase) -> Any:
        real = reading().prepare(of)
        return dataclasses.replace(real, run=lambda: calls.append("") or real.run())  # type: ignore[func-returns-value]

    measure([(case(), Contender("a", prepare))], rounds=3, shortest=0)
    assert len(calls) == 1 + 3  # one to warm up
