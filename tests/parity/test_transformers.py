"""transformers' models compute with attnops' attention what they compute with their own, and so do their gradients."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import pytest
import torch
from transformers_faults import faulty
from transformers_models import ARCHITECTURES, Architecture

from attnops_adapters.transformers import Attend, attend_with, register, uses

# float32 against float32, each some 5e-6 off float64; the largest logits are from 1 to 10.
LOGITS = 2e-5

NAMES = sorted(ARCHITECTURES)
FAULTS = [(name, fault) for name in NAMES for fault in ("scale", *ARCHITECTURES[name].faults)]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a model computed: logits [B, T, vocabulary], 0 for padding, and a gradient for each parameter."""

    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]


def run(architecture: Architecture, model: torch.nn.Module, backward: bool = True) -> Run:
    """A forward pass, and a backward pass of random cotangents."""
    inputs = architecture.inputs()
    model.zero_grad()
    with torch.set_grad_enabled(backward):
        logits = model(**inputs, use_cache=False).logits
    is_token = inputs.get("decoder_attention_mask", inputs.get("attention_mask", torch.ones(logits.shape[:2])))
    is_token = is_token[..., None]
    if backward:
        cotangents = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
        logits.backward(is_token * cotangents)
    given = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Run((is_token * logits).detach(), given)


@functools.cache
def eager(name: str) -> tuple[torch.nn.Module, Run]:
    """A model, and what it computes with its own attention in PyTorch."""
    model = ARCHITECTURES[name].build()
    model.set_attn_implementation("eager")
    return model, run(ARCHITECTURES[name], model)


def run_with(name: str, attend: Attend, backward: bool = True) -> Run:
    """What the same model computes with ``attend``."""
    architecture, (model, _) = ARCHITECTURES[name], eager(name)
    register("attnops", attend)
    if architecture.forward is None:
        model.set_attn_implementation("attnops")
    with architecture.patched(attend):
        return run(architecture, model, backward)


def worst_gradient(actual: Run, expected: Run) -> float:
    """The largest error of a parameter's gradient, relative to that gradient's largest element.

    Or to a hundredth of the largest of all: softmax does not depend on a bias of all keys, whose gradient is rounding.
    """
    assert actual.gradients.keys() == expected.gradients.keys()
    least = 0.01 * max(float(g.abs().max()) for g in expected.gradients.values())
    return max(
        float((actual.gradients[name] - g).abs().max()) / max(float(g.abs().max()), least)
        for name, g in expected.gradients.items()
    )


def worst_logit(actual: Run, expected: Run) -> float:
    return float((actual.logits - expected.logits).abs().max())


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small arrays, and a process of the test runner for each core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    eager.cache_clear()


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_are_those_of_eager_attention(name: str, calls: list[set[str]]) -> None:
    expected = eager(name)[1]
    actual = run_with(name, attend_with("flash"))
    architecture = ARCHITECTURES[name]
    assert uses(eager(name)[0]) is (architecture.forward is None)
    assert len(calls) == architecture.layers
    assert calls == list(architecture.masks)  # none is an array
    assert expected.logits.abs().max() > 1
    assert worst_logit(actual, expected) <= LOGITS
    assert worst_gradient(actual, expected) <= architecture.gradients


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_fault_is_outside_the_tolerance(name: str, fault: str) -> None:
    actual = run_with(name, faulty(attend_with("flash"), fault), backward=False)
    assert worst_logit(actual, eager(name)[1]) > 10 * LOGITS


@pytest.mark.parametrize("name", ["mpt", "bloom"])
def test_a_model_that_ignores_the_interface_is_known_to(name: str, calls: list[set[str]]) -> None:
    """Were one of these models to use the interface, its layers would not need a forward of their own."""
    register("attnops", attend_with("flash"))
    model = ARCHITECTURES[name].build()
    assert not uses(model)
    model.set_attn_implementation("attnops")  # which warns
    assert model.config._attn_implementation == "eager"
    run(ARCHITECTURES[name], model, backward=False)
    assert not calls
