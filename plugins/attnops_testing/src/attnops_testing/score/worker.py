"""Runs cases through an adapter, in the environment of its library: ``python worker.py ADAPTER FOLDER CASE...``.

It needs NumPy and the library alone. ``FOLDER/CASE.npz`` has the arrays as float32 and ``CASE.json`` the rest;
``CASE.out.npz`` gets the outputs and gradients, and then ``CASE.out.json`` how the call ended.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import json
import platform
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Named = dict[str, Any]
# Arrays that have a gradient, and arrays of integers or booleans.
FLOATS = ("query", "key", "value", "bias", "sinks")


class Refused(Exception):
    """What an adapter raises where its library has no argument for a call, or documents that it does not serve it."""


class Adapter:
    """An adapter's module: ``attend`` and its declarations.

    ``attend(q, k, v, *, ...)`` gets the framework's arrays in the layout [B, T, H, D] and, of the options ``causal``,
    ``mask``, ``bias``, ``window``, ``soft_cap``, ``sinks``, ``segments``, ``lengths``, ``scale``, ``lse`` and
    ``dropout``, those that a case has; it returns [B, T, H, Dv], or with ``lse`` also [B, H, T]. An option that is no
    parameter of it is refused, with the text that ``REFUSES`` has for it.
    """

    def __init__(self, path: str) -> None:
        spec = importlib.util.spec_from_file_location("adapter", path)
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        sys.modules["adapter"] = module
        spec.loader.exec_module(module)
        self.attend: Callable[..., Any] = module.attend
        self.framework: str = module.FRAMEWORK
        self.package: str = module.PACKAGE
        self.gradients: bool = getattr(module, "GRADIENTS", True)
        self.refuses: dict[str, str] = getattr(module, "REFUSES", {})
        # By a text in errors that are not the library's, why a case is not run.
        self.not_run: dict[str, str] = getattr(module, "NOT_RUN", {})
        self._parameters = inspect.signature(module.attend).parameters

    def check(self, case: Named) -> None:
        """Refuse a case for which the library has no argument, or whose property the adapter names."""
        for name in (case["name"], case["kind"], case["dtype"], *case["options"]):
            if name in self.refuses:
                raise Refused(self.refuses[name])
        for name in case["options"]:
            if name not in self._parameters:
                raise Refused(f"no argument for it: {name}")


def run_jax(adapter: Adapter, case: Named, arrays: Named) -> Named:
    """The case under `jax.jit`."""
    import jax
    import jax.numpy as jnp

    dtype = jnp.dtype(case["dtype"])
    given = {name: jnp.asarray(x, dtype if name in FLOATS else None) for name, x in arrays.items()}
    if case["bias_dtype"]:
        given["bias"] = given["bias"].astype(case["bias_dtype"])
    inputs = {name: given[name] for name in FLOATS if name in given}

    def call(inputs: Named) -> tuple[Any, ...]:
        out = adapter.attend(*(inputs[name] for name in FLOATS[:3]), **options(case, given | inputs))
        return out if isinstance(out, tuple) else (out,)

    if case["kind"] == "vmap":
        inputs = {name: x.reshape(2, x.shape[0] // 2, *x.shape[1:]) for name, x in inputs.items()}
        results = jax.jit(jax.vmap(call))(inputs)
        return {"out": results[0].reshape(-1, *results[0].shape[2:])}
    if not case["gradients"]:
        return dict(zip(("out", "lse"), jax.jit(call)(inputs), strict=False))

    def gradients(inputs: Named) -> tuple[tuple[Any, ...], Named]:
        results, pull_back = jax.vjp(call, inputs)
        cotangents = tuple(given[name].astype(x.dtype) for name, x in zip(("d_out", "d_lse"), results, strict=False))
        return results, pull_back(cotangents)[0]

    results, found = jax.jit(gradients)(inputs)
    named = dict(zip(("out", "lse"), results, strict=False)) | {f"gradient of {name}": x for name, x in found.items()}
    if case["kind"] == "second derivatives":
        tangents = {name: given[f"t_{name}"].astype(x.dtype) for name, x in inputs.items()}
        second = jax.jit(lambda x: jax.jvp(lambda y: gradients(y)[1], (x,), (tangents,))[1])(inputs)
        named |= {f"second derivative of {name}": x for name, x in second.items()}
    return named


def run_torch(adapter: Adapter, case: Named, arrays: Named) -> Named:
    """The case in eager mode."""
    import torch

    def tensor(name: str, x: Any) -> Any:
        made = torch.from_numpy(np.array(x))
        made = (
            made.to(getattr(torch, (name == "bias" and case["bias_dtype"]) or case["dtype"]))
            if name in FLOATS
            else made
        )
        if case["kind"] == "strided" and name in FLOATS:  # every other element of a transposed tensor
            made = made.repeat_interleave(2, -1).transpose(0, 1).contiguous().transpose(0, 1)[..., ::2]
        return made

    given = {name: tensor(name, x) for name, x in arrays.items()}
    inputs = {name: given[name].requires_grad_(case["gradients"]) for name in FLOATS if name in given}

    def call(*qkv: Any) -> tuple[Any, ...]:
        out = adapter.attend(*qkv, **options(case, given))
        return out if isinstance(out, tuple) else (out,)

    qkv = [inputs[name] for name in FLOATS[:3]]
    if case["kind"] == "vmap":
        results = torch.vmap(call)(*(x.reshape(2, x.shape[0] // 2, *x.shape[1:]) for x in qkv))
        return {"out": results[0].flatten(0, 1)}
    results = call(*qkv)
    named = dict(zip(("out", "lse"), results, strict=False))
    if case["gradients"]:
        second = case["kind"] == "second derivatives"
        cotangents = [given[name].to(x.dtype) for name, x in zip(("d_out", "d_lse"), results, strict=False)]
        found = torch.autograd.grad(results, list(inputs.values()), cotangents, create_graph=second)
        named |= {f"gradient of {name}": x for name, x in zip(inputs, found, strict=True)}
        if second:
            tangents = [given[f"t_{name}"] for name in inputs]
            again = torch.autograd.grad(found, list(inputs.values()), tangents)
            named |= {f"second derivative of {name}": x for name, x in zip(inputs, again, strict=True)}
    return {name: x.detach().float() for name, x in named.items()}


def run_numpy(adapter: Adapter, case: Named, arrays: Named) -> Named:
    """The case of a library that takes NumPy's arrays, forward."""
    import ml_dtypes  # registers bfloat16  # noqa: F401

    dtype = np.dtype(case["dtype"])
    given = {name: x.astype(dtype) if name in FLOATS else x for name, x in arrays.items()}
    if case["kind"] == "strided":
        given |= {name: np.repeat(given[name], 2, -1)[..., ::2] for name in FLOATS if name in given}
    out = adapter.attend(*(given[name] for name in FLOATS[:3]), **options(case, given))
    return dict(zip(("out", "lse"), out if isinstance(out, tuple) else (out,), strict=False))


def options(case: Named, given: Named) -> Named:
    """The options of a case: values of JSON, and arrays by name."""
    return {name: given[name] if value is None else value for name, value in case["options"].items()}


def run(adapter: Adapter, case: Named, arrays: Named) -> tuple[Named, Named]:
    """The results of a case by name, and how it ended; without gradients where only they raise."""
    function = {"jax": run_jax, "torch": run_torch, "numpy": run_numpy}[adapter.framework]
    ending: Named = {"ending": "done"}
    try:
        adapter.check(case)
        if case["gradients"] and not adapter.gradients:
            case["gradients"], ending["forward"] = False, {"type": "NotImplementedError", "message": "forward alone"}
        try:
            results = function(adapter, case, arrays)
        except Exception as error:
            if not case["gradients"] or case["kind"] == "second derivatives" or isinstance(error, Refused):
                raise
            ending["forward"] = _describe(error)
            results = function(adapter, case | {"gradients": False}, arrays)
        return {name: np.asarray(x).astype(np.float32) for name, x in results.items()}, ending
    except Refused as error:
        return {}, {"ending": "refused", "message": str(error)}
    except Exception as error:
        for text, reason in adapter.not_run.items():
            if text in str(error):
                return {}, {"ending": "not run", "message": reason}
        return {}, {"ending": "raised"} | _describe(error)


def _describe(error: Exception) -> Named:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}"
    message = (str(error) or frame.line or "").replace(f"{Path(__file__).parents[2]}/", "")
    return {"type": type(error).__name__, "message": message[:2000], "place": place}


def main(path: str, folder: Path, names: list[str]) -> None:
    """Run the cases in turn."""
    adapter = Adapter(path)
    version = f"{importlib.metadata.version(adapter.package)}, Python {platform.python_version()}"
    for name in names:
        case = json.loads((folder / f"{name}.json").read_text())
        with np.load(folder / f"{name}.npz") as arrays:
            results, ending = run(adapter, case, dict(arrays))
        np.savez(folder / f"{name}.out.npz", **results)
        part = folder / f"{name}.part"
        part.write_text(json.dumps(ending | {"version": version}))
        part.rename(folder / f"{name}.out.json")


if __name__ == "__main__":
    sys.modules["worker"] = sys.modules["__main__"]  # adapters import `Refused` from it
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
