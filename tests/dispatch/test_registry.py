"""Which class serves a name on a platform: by priority, by registration, by rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import attnops
from attnops import OperationMetadata, OperationRegistry
from attnops.errors import AmbiguousOperationError, DuplicateOperationError
from attnops.operations.vanilla import VanillaAttention

# The source of a module that records its import.
OPERATION = Path(__file__).with_name("zeta.py").read_text()
TPU = "\n    def forward_tpu(self, query, key, value):\n        return self.forward_native(query, key, value)\n"
CUDA = TPU.replace("tpu", "cuda")

Install = Callable[..., None]


def test_two_that_serve_one_platform_are_ambiguous_there_only(install: Install) -> None:
    install("acme-one", OPERATION + TPU)
    install("acme-two", OPERATION + TPU)
    install("acme-three", OPERATION + CUDA)
    with pytest.raises(AmbiguousOperationError) as caught:
        OperationRegistry.get("zeta", "tpu")
    assert str(caught.value) == (
        "'zeta' on tpu is served by acme-one:zeta and acme-two:zeta with the same priority=0; use one of these "
        "names, or disable one with ATTNOPS_DISABLE"
    )
    assert OperationRegistry.get("acme-two:zeta", "tpu").__module__ == "acme_two"
    assert OperationRegistry.get("zeta", "cuda").__module__ == "acme_three"


def test_the_higher_priority_wins(install: Install) -> None:
    install("acme-one", OPERATION + TPU)
    install("acme-two", OPERATION.replace("api_version = 2", "priority = 1") + TPU)
    assert OperationRegistry.get("zeta", "tpu").__module__ == "acme_two"


@pytest.mark.slow
def test_the_core_serves_where_no_other_has_a_forward_of_its_own(install: Install) -> None:
    install(
        "acme-attention",
        OPERATION.replace("zeta", "vanilla") + TPU,
        entry_points={"vanilla": "acme_attention:Operation"},
    )
    assert OperationRegistry.get("vanilla", "tpu").__module__ == "acme_attention"
    assert OperationRegistry.get("vanilla", "cuda") is VanillaAttention
    assert OperationRegistry.get("attnops:vanilla", "tpu") is VanillaAttention
    q = jnp.ones((1, 3, 2, 4))
    out = OperationRegistry.create("vanilla", OperationMetadata(platform="cpu"))(q, q, 2 * q)
    assert jnp.allclose(out.attention_outputs, 2.0)


def test_another_distributions_class_serves_where_a_subclass_of_it_has_no_forward_of_its_own(install: Install) -> None:
    install("acme-base", OPERATION + CUDA)
    derived = "from acme_base import Operation as Base\n\n\nclass Operation(Base):\n"
    install("acme-tpu", derived + TPU)
    served = {x: OperationRegistry.get("zeta", x).__module__ for x in ("cpu", "cuda", "rocm", "tpu")}
    assert served == {"cpu": "acme_base", "cuda": "acme_base", "rocm": "acme_base", "tpu": "acme_tpu"}
    # A class between them does not count as a forward of the last one's own.
    install("acme-last", "from acme_tpu import Operation as Base\n\n\nclass Operation(Base):\n    pass\n")
    assert {x: OperationRegistry.get("zeta", x).__module__ for x in served} == served


def test_an_unknown_name_lists_near_ones(install: Install) -> None:
    install("acme-attention")
    with pytest.raises(ValueError, match=r"impl_name='zetta' is not an installed operation; .*did you mean 'zeta'"):
        OperationRegistry.get("zetta")
    with pytest.raises(ValueError, match=r"did you mean .*zeta"):
        OperationRegistry.get(":zeta")
    with pytest.raises(ValueError, match="did you mean 'acme-attention:zeta'"):
        OperationRegistry.get("acme-atention:zeta")


def test_a_class_of_a_script_has_a_name(install: Install) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(OPERATION.replace("sys.imported_by_test", "[]"), namespace)
    OperationRegistry.register(namespace["Operation"])
    (found,) = (plugin for plugin in OperationRegistry.plugins() if plugin.name == "main:zeta")
    assert found.operation_class is namespace["Operation"]


def test_a_second_class_for_one_name_and_platform_is_refused_unless_it_overrides(install: Install) -> None:
    class Zeta(VanillaAttention):
        __module__ = "acme_attention.first"

        @classmethod
        def get_impl_name(cls) -> str:
            return "zeta"

        def forward_tpu(self, query: Any, key: Any, value: Any) -> Any: ...

    class Second(Zeta):
        __module__ = "acme_attention.second"

    class OnCuda(VanillaAttention):
        __module__ = "acme_attention.third"
        get_impl_name = Zeta.get_impl_name

        def forward_cuda(self, query: Any, key: Any, value: Any) -> Any: ...

    OperationRegistry.register(Zeta)
    with pytest.raises(DuplicateOperationError) as caught:
        OperationRegistry.register(Second)
    assert "acme-attention already has acme_attention.first:" in str(caught.value)
    assert "for the same platform; register with override=True to replace it" in str(caught.value)
    OperationRegistry.register(OnCuda)  # another platform
    assert OperationRegistry.get("zeta", "tpu") is Zeta
    assert OperationRegistry.get("zeta", "cuda") is OnCuda

    OperationRegistry.register(override=True)(Second)
    assert OperationRegistry.get("zeta", "tpu") is Second


def test_a_class_by_hand_leaves_the_entry_points_platforms_alone(install: Install) -> None:
    install("acme-attention", OPERATION + TPU)
    hand: dict[str, Any] = {}
    exec(OPERATION.replace("sys.imported_by_test", "[]") + CUDA, {"__name__": "acme_attention.cuda"}, hand)
    OperationRegistry.register(hand["Operation"])
    assert OperationRegistry.get("zeta", "cuda") is hand["Operation"]
    assert OperationRegistry.get("zeta", "tpu").__module__ == "acme_attention"

    hand["Operation"].forward_tpu = hand["Operation"].forward_cuda
    OperationRegistry.refresh()
    with pytest.raises(DuplicateOperationError, match=r"acme-attention has .* for 'zeta' on tpu; register .*override="):
        OperationRegistry.get("zeta", "tpu")
    OperationRegistry.register(override=True)(hand["Operation"])
    assert OperationRegistry.get("zeta", "tpu") is hand["Operation"]


@pytest.mark.parametrize("method", ["rank(cls, request)", "unsupported(self, request)", "__init__(self, metadata)"])
def test_one_that_raises_when_asked_is_not_chosen_and_others_are(install: Install, method: str) -> None:
    decorator = "@classmethod\n    " if "cls" in method else ""
    source = OPERATION + CUDA + f"\n    {decorator}def {method}:\n        raise KeyError('oops')\n"
    install("acme-attention", source)
    q = jnp.ones((1, 3, 2, 4))
    operation = OperationRegistry.create("auto", OperationMetadata(platform="cuda"))
    explanation = attnops.explain(operation.request(q, q, q))
    (other,) = (c for c in explanation.others if c.name == "acme-attention:zeta")
    assert not other.serves
    name = method.partition("(")[0]
    assert other.problem == f"failed: acme_attention:Operation.{name} raised KeyError: 'oops'"
    assert explanation.chosen.name.startswith("attnops")


def test_auto_breaks_ties_by_priority(install: Install) -> None:
    for name, priority in (("acme-one", 0), ("acme-two", 1)):
        body = (
            "\n    @classmethod\n    def rank(cls, request):\n        return __import__('attnops').Rank.TILED_KERNEL\n"
        )
        source = OPERATION.replace("api_version = 2", f"priority = {priority}") + CUDA + body
        install(name, source, entry_points={name: f"{name.replace('-', '_')}:Operation"})
    q = jnp.ones((1, 3, 2, 4))
    request = OperationRegistry.create("auto", OperationMetadata(platform="cuda")).request(q, q, q)
    assert attnops.explain(request).chosen.name == "acme-two:acme-two"


def test_auto_prefers_a_subclass_of_vanilla_where_it_has_a_kernel_and_the_core_elsewhere(install: Install) -> None:
    source = OPERATION.replace("api_version = 2", "api_version, priority = 2, 10") + TPU
    install("acme-attention", source, entry_points={"vanilla": "acme_attention:Operation"})
    q = jnp.ones((1, 3, 2, 4))
    request = OperationRegistry.create("auto", OperationMetadata(platform="tpu")).request(q, q, q)
    assert attnops.explain(request).chosen.name == "acme-attention:vanilla"
    elsewhere = attnops.explain(request.replace(platform="cpu"))
    order = [candidate.name for candidate in (elsewhere.chosen, *elsewhere.others)]
    assert order.index("attnops:vanilla") < order.index("acme-attention:vanilla")


def test_explaining_what_is_not_attention_teaches(install: Install) -> None:
    source = OPERATION.replace("VanillaAttention)", "__import__('attnops').BaseOperation)")
    install("acme-attention", source + "\n    def forward_native(self, x):\n        return x\n")
    q = jnp.ones((1, 3, 2, 4))
    request = OperationRegistry.create("auto").request(q, q, q)
    with pytest.raises(ValueError, match="operation='zeta' has computes=None, but the request is of 'attention'"):
        attnops.explain(request, "zeta")
