"""Small operations with one fault each, which `attnops check` and the pytest suite must both find."""

import time
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from attnops import Limits, OperationOutput
from attnops.kernels import varies
from attnops.operations.vanilla import VanillaAttention


class Planted(VanillaAttention):
    """Serves grouped heads, masks and scales; forward only, which is quick."""

    limits: ClassVar = {"cpu": Limits(differentiable=False, linear_memory=False)}

    @classmethod
    def get_impl_name(cls) -> str:
        return cls.__name__

    def forward_cpu(self, query: Any, key: Any, value: Any, *, mask: Any = None, softmax_scale: Any = None) -> Any:
        out = self.forward_native(query, key, value, mask=mask, softmax_scale=softmax_scale)
        return OperationOutput(self.changed(out.attention_outputs, key))

    def changed(self, out: Any, key: Any) -> Any:
        return out


def kernel(name: str, lowering: Any = lambda ctx, x: [x]) -> Primitive:
    """What is opaque to JAX: a function of one array that returns it, compiled by ``lowering``."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, lowering)
    return primitive


def lowered_for_export(ctx: Any, x: Any) -> Any:
    if ctx.module_context.lowering_parameters.for_export:
        raise NotImplementedError("a custom call to 'planted' can't be serialised")
    return [x]


def sleeping(x: Any) -> Any:
    """``x``, after a while in which no core computes."""
    return jax.pure_callback(lambda x: (time.sleep(0.1), x)[1], x, x)


NO_BATCHING = kernel("planted_without_batching")
FIRST_SLICE = kernel("planted_of_the_first_slice")
batching.primitive_batchers[FIRST_SLICE] = lambda arrays, axes: (
    jnp.broadcast_to(lax.index_in_dim(arrays[0], 0, axes[0]), arrays[0].shape),
    axes[0],
)
NO_EXPORT = kernel("planted_without_export", lowered_for_export)
batching.defvectorized(NO_EXPORT)


class NoVmap(Planted):
    def changed(self, out: Any, key: Any) -> Any:
        return NO_BATCHING.bind(out)


class WrongVmap(Planted):
    def changed(self, out: Any, key: Any) -> Any:
        return FIRST_SLICE.bind(out)


class WrongShardMap(Planted):
    def changed(self, out: Any, key: Any) -> Any:
        return lax.psum(out, "batch") if varies(out) else out


class NoExport(Planted):
    def changed(self, out: Any, key: Any) -> Any:
        return NO_EXPORT.bind(out)


class Asserts(Planted):
    def changed(self, out: Any, key: Any) -> Any:
        heads, kv_heads = out.shape[2], key.shape[2]
        assert heads == kv_heads, f"{heads} heads, {kv_heads} kv heads"
        return out


class Hangs(Planted):
    """With grouped heads its program never ends."""

    def changed(self, out: Any, key: Any) -> Any:
        if out.shape[2] == key.shape[2]:
            return out
        return lax.while_loop(lambda x: jnp.isfinite(x).all(), sleeping, out)


class HangsInPython(Planted):
    """With grouped heads tracing it never ends."""

    def changed(self, out: Any, key: Any) -> Any:
        while out.shape[2] != key.shape[2]:
            pass
        return out


# By class: the check that finds it, what is said, and the line of source that raised, if one did.
FAULTS: dict[type[Planted], tuple[str, str, str]] = {
    NoVmap: ("vmap", "NotImplementedError: Batching rule for 'planted_without_batching'", "NO_BATCHING.bind(out)"),
    WrongVmap: ("vmap", "attention_outputs[", ""),
    WrongShardMap: ("shard_map", "attention_outputs[", ""),
    NoExport: ("export", "NotImplementedError: a custom call to 'planted' can't be serialised", "raise NotImplemented"),
    Asserts: ("GQA", "AssertionError: 4 heads, 2 kv heads", "assert heads == kv_heads"),
}
HANGS = (Hangs, HangsInPython)
