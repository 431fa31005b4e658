"""The engine of the server, step by step: batching, sharing, preemption and cancelling don't change any text."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from lm_server import CHUNK, LENGTH, PAGE, PAGES, check_pages

from attnops_caches import Quantized
from attnops_lm.model import CausalLM
from attnops_lm.serve import Delta, Engine, Pages, QueueFullError, Request, StoppedError
from attnops_lm.testing import Characters, small


def make_engine(model: CausalLM, **options: Any) -> Engine:
    sizes = {"rows": 4, "pages": PAGES, "page_size": PAGE, "max_length": LENGTH, "chunks": [CHUNK]}
    return Engine(model, Characters(), **(sizes | options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return small()


@pytest.fixture(scope="module")
def warm_engine(model: CausalLM) -> Engine:
    engine = make_engine(model)
    engine.warm()
    return engine


@pytest.fixture
def engine(warm_engine: Engine) -> Iterator[Engine]:
    """An engine without cached prefixes. Asserts afterwards that it is empty, and that no further program was
    traced.
    """
    warm_engine.pages, traces = Pages(PAGES, PAGE), warm_engine.counts["traces"]
    warm_engine.counts = collections.Counter()
    arrays = len(jax.live_arrays())
    yield warm_engine
    assert warm_engine.pages.available == warm_engine.pages.count
    assert not any(warm_engine.pages.references)
    assert warm_engine.counts["traces"] == 0
    assert len(jax.live_arrays()) == arrays
    warm_engine.counts["traces"] = traces


def greedy(model: CausalLM) -> Callable[[list[int], int], list[int]]:
    """Greedy tokens after a prompt, each a pass over all tokens, without a cache."""
    graph, state = nnx.split(model)

    @jax.jit
    def best(tokens: jax.Array, last: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(tokens, logits_at=last[None, None]).logits[0, 0].argmax()

    def tokens_after(prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            padded = np.zeros((1, LENGTH), np.int32)
            padded[0, : len(tokens)] = tokens
            tokens.append(int(best(padded, np.int32(len(tokens) - 1))))
        return tokens[len(prompt) :]

    return tokens_after


@pytest.fixture(scope="module")
def alone(model: CausalLM) -> Callable[[list[int], int], list[int]]:
    """The tokens that are generated for a prompt alone."""
    find = greedy(model)
    find([1], 1)
    return find


def make_prompts(count: int, seed: int = 0, most: int = 30) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 96, int(generator.integers(1, most))).tolist() for _ in range(count)]


def serve(engine: Engine, *requests: Request, until: Callable[[], bool] = lambda: False) -> list[list[int]]:
    """Serve requests, and return the tokens that were generated for each."""
    engine.submit(*requests)
    while not until() and engine.step():
        check_pages(engine)
    return [request.tokens[request.prompt_length :] for request in requests]


@pytest.mark.slow
def test_a_prompt_in_chunks_equals_the_whole_prompt(engine: Engine, alone: Any):
    prompt = make_prompts(1, most=2)[0] * 3 * CHUNK
    assert serve(engine, Request(list(prompt), 10)) == [alone(prompt, 10)]
    assert engine.counts["steps"] == 3 + 9


@pytest.mark.slow
def test_requests_that_join_and_leave_equal_each_alone_in_a_pool_too_small_for_all(engine: Engine, alone: Any):
    prompts = make_prompts(24)
    counts = np.random.default_rng(1).integers(1, 30, len(prompts)).tolist()
    results = serve(engine, *(Request(list(x), n) for x, n in zip(prompts, counts, strict=True)))
    assert results == [alone(x, n) for x, n in zip(prompts, counts, strict=True)]
    assert engine.counts["preempted"] > 3


def test_a_sampled_text_is_the_same_alone_and_preempted_among_others(engine: Engine):
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": 7}
    prompts = make_prompts(12, seed=2)
    own = serve(engine, Request(list(prompts[5]), 30, **options))[0]
    assert own != serve(engine, Request(list(prompts[5]), 30, **(options | {"seed": 8})))[0]
    requests = [Request(list(x), 30) for x in prompts]
    requests[5] = Request(list(prompts[5]), 30, **options)
    preempted: list[int] = []
    release = engine._release
    engine._release = lambda x: (preempted.append(requests.index(x)), release(x))  # type: ignore[method-assign]
    results = serve(engine, *requests)
    del engine._release
    assert preempted.count(5) > 1  # preempted before it ended
    assert results[5] == own


def test_a_shared_prefix_equals_a_copy_of_its_own_and_takes_its_pages_once(engine: Engine, alone: Any):
    prefix, ends = make_prompts(1, seed=3, most=2)[0] * 24, make_prompts(4, seed=4, most=5)
    requests = [Request(prefix + end, 8) for end in ends]
    most = 0

    def count() -> bool:
        nonlocal most
        most = max(most, PAGES - engine.pages.available)
        return False

    results = serve(engine, *requests, until=count)
    assert results == [alone(prefix + end, 8) for end in ends]
    assert [x.cached for x in requests[1:]] == [24] * 3
    assert most <= 6 + 4 * 4  # without sharing, four requests of 36 tokens take 36 pages
    assert engine.counts["preempted"] == 0


def test_without_sharing_every_prompt_is_computed_from_its_first_token(engine: Engine, alone: Any):
    engine.pages.sharing = False
    prompt = make_prompts(1, seed=5, most=2)[0] * 20
    requests = [Request(list(prompt), 4) for _ in range(3)]
    assert serve(engine, *requests) == [alone(prompt, 4)] * 3
    assert [x.cached for x in requests] == [0, 0, 0]


def test_a_page_that_is_shared_in_part_is_copied_before_it_is_written_to(engine: Engine, alone: Any):
    prompt = list(range(16))
    other = [*prompt[:15], 90, 91]  # its fourth page differs in the last token
    first, second, third = (Request(list(x), 20) for x in (prompt, other, prompt))
    results = serve(engine, first, until=lambda: len(first.tokens) > 24)
    results = serve(engine, second, third)
    assert [first.tokens[16:], *results] == [alone(x, 20) for x in (prompt, other, prompt)]
    assert [second.cached, third.cached] == [15, 15]
    assert engine.counts["copied"] == 2


def test_a_request_that_needs_every_page_does_without_a_copy(engine: Engine, alone: Any):
    engine.pages = Pages(LENGTH // PAGE, PAGE)
    prompt = make_prompts(1, seed=10, most=2)[0] * 61
    prompt[14] += 1
    first, second = Request(prompt[:14] + [5] * 6, 4), Request(list(prompt), 3)
    serve(engine, first)
    assert serve(engine, second) == [alone(prompt, 3)]


def test_a_cancelled_request_gives_its_pages_back_and_the_others_are_undisturbed(engine: Engine, alone: Any):
    prompts = make_prompts(6, seed=6)
    requests = [Request(list(x), 20) for x in prompts]
    serve(engine, *requests, until=lambda: len(requests[0].tokens) > requests[0].prompt_length + 3)
    engine.cancel(requests[0], requests[5])  # one runs, one waits
    serve(engine)
    for request, prompt in zip(requests[1:5], prompts[1:5], strict=True):
        assert request.tokens[len(prompt) :] == alone(prompt, 20)
    assert len(requests[0].tokens) < len(prompts[0]) + 20
    assert requests[5].tokens == prompts[5]


def test_text_ends_before_a_stop_string_and_at_an_end_token(engine: Engine, alone: Any):
    prompt, characters = make_prompts(1, seed=8)[0], Characters()
    tokens = alone(prompt, 20)
    text = characters.decode(tokens)
    place = next(i for i in range(3, 20) if text.find(text[i : i + 2]) == i)

    def deltas(**options: Any) -> list[Delta]:
        found: list[Delta] = []
        serve(engine, Request(list(prompt), 20, emit=found.append, **options))
        return found

    stopped = deltas(stop=(text[place : place + 2],))
    assert ("".join(x.text for x in stopped), stopped[-1].finish_reason) == (text[:place], "stop")
    whole = deltas(stop=("no such text",))
    assert ("".join(x.text for x in whole), whole[-1].finish_reason) == (text, "length")
    end = next(i for i in range(1, 20) if tokens[i] not in tokens[:i])
    engine.eos_ids = frozenset([tokens[end]])
    ended, ignored = deltas(), deltas(ignore_eos=True)
    engine.eos_ids = frozenset()
    assert ("".join(x.text for x in ended), ended[-1].finish_reason) == (text[:end], "stop")
    assert "".join(x.text for x in ignored) == text


def test_the_programs_are_traced_once_each(warm_engine: Engine):
    assert warm_engine.counts["traces"] == 2  # and the fixture asserts that nothing else traced


def test_what_can_not_be_served_is_refused_when_it_is_submitted(engine: Engine):
    for tokens, count in (([], 1), ([1], 0), ([1] * LENGTH, 1)):
        with pytest.raises(ValueError, match=f"together at most max_length={LENGTH}"):
            engine.submit(Request(tokens, count))
    wrong: list[tuple[list[int], dict[str, Any]]] = [
        ([1, 96], {}), ([-1], {}), ([1], {"seed": 1 << 32}), ([1], {"seed": -1}), ([1], {"top_k": -1}),
        ([1], {"top_p": 0.0}), ([1], {"temperature": float("nan")}), ([1], {"temperature": -1.0}),
    ]  # fmt: skip
    for tokens, options in wrong:
        with pytest.raises(ValueError, match="must"):
            engine.submit(Request(tokens, 1, **options))
    engine.max_waiting = 2
    with pytest.raises(ValueError, match="3 requests at a time must be at most max_waiting=2; submit fewer"):
        engine.submit(*(Request([1], 1) for _ in range(3)))
    first = Request([1], 1)
    engine.submit(first)
    with pytest.raises(QueueFullError, match="1 requests wait, and 2 more would be above max_waiting=2; send them ag"):
        engine.submit(*(Request([1], 1) for _ in range(2)))
    engine.cancel(first)
    assert not engine.step()
    engine.max_waiting = 256


def test_an_engine_that_could_not_serve_every_request_is_refused(model: CausalLM):
    with pytest.raises(ValueError, match=r"pages=3 of 4 tokens must hold one request of max_length=16"):
        make_engine(model, pages=3, max_length=16)
    with pytest.raises(ValueError, match="max_length=257 must be at most the model's context, 256 tokens"):
        make_engine(model, pages=100, max_length=257)
    with pytest.raises(ValueError, match="rows=4, page_size=0 and max_length=64 must each be at least 1"):
        make_engine(model, page_size=0)
    with pytest.raises(ValueError, match="must be more than rows=4"):
        make_engine(model, chunks=[4])


def test_an_engine_that_fails_tells_all_requests_and_takes_no_more(model: CausalLM, monkeypatch: pytest.MonkeyPatch):
    engine = make_engine(model, rows=1)
    monkeypatch.setattr(engine, "_call", lambda *_: (_ for _ in ()).throw(RuntimeError("no device")))
    found: list[Delta] = []
    engine.submit(*(Request([1, 2], 3, emit=found.append) for _ in range(2)))
    with pytest.raises(RuntimeError, match="no device"):
        engine.run()
    assert found == [Delta("RuntimeError: no device", "error")] * 2
    assert isinstance(engine.failure, RuntimeError)
    with pytest.raises(StoppedError):
        engine.submit(Request([1], 1))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
@pytest.mark.tier(every=2)
def test_windows_and_sinks_over_shared_pages_equal_each_alone(family: str):
    model = small(family)
    engine, prompts = make_engine(model), make_prompts(8, seed=9)
    results = serve(engine, *(Request(x[:2] * 8 + x, 10) for x in prompts))
    find = greedy(model)
    assert results == [find(x[:2] * 8 + x, 10) for x in prompts]


@pytest.mark.slow
def test_requests_over_pages_in_int8_equal_each_alone_over_such_pages(model: CausalLM):
    engine, prompts = make_engine(model, codec=Quantized("int8")), make_prompts(8, seed=11)
    prompts = [list(range(14)) + x for x in prompts]
    together = serve(engine, *(Request(list(x), 15) for x in prompts))
    assert engine.counts["preempted"] * engine.counts["copied"] * engine.counts["shared"] > 0
    for prompt, result in zip(prompts, together, strict=True):
        engine.pages = Pages(PAGES, PAGE)
        assert serve(engine, Request(list(prompt), 15)) == [result]


def test_a_waiting_engine_wakes_for_a_request_and_ends_when_it_is_stopped(engine: Engine, alone: Any):
    thread = threading.Thread(target=engine.run)
    thread.start()
    done = threading.Event()
    request = Request([1, 2, 3], 5, emit=lambda delta: delta.finish_reason and done.set())
    engine.submit(request)
    assert done.wait(60)
    engine.stop()
    thread.join(60)
    assert not thread.is_alive()
    engine.is_stopped = False
    assert request.tokens[3:] == alone([1, 2, 3], 5)
