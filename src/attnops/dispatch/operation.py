"""BaseOperation, the dispatcher."""

from __future__ import annotations

import abc
from collections.abc import Hashable, Iterable, Mapping
from typing import ClassVar, Final, final

import jax
import jax.numpy as jnp

from attnops.dispatch import border
from attnops.dispatch.call import Call, resolve_mode
from attnops.dispatch.decision import decide, warn_once
from attnops.dispatch.forwards import all_options, by_position, fallback, forward_for, named_options
from attnops.dispatch.limits import Limits
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.platforms import find_platform
from attnops.dispatch.request import AttentionRequest, Request, dtype_name
from attnops.dispatch.vocabulary import hint
from attnops.errors import Reason, UnsupportedError
from attnops.kernels.nograd import not_differentiable
from attnops.typing import Function, PyTree

API_VERSION: Final = 2
"""The version of the plugin API, incremented when a plugin written for the previous one would break.

It covers the names in ``__all__`` of `attnops`, `attnops.kernels`, `attnops.masks`, `attnops.biases`,
`attnops.softmax`, `attnops.typing`, `attnops.dropout`, `attnops.exported`, `attnops.sharding`, `attnops.partition`,
`attnops_caches`, `attnops_caches.masks`, `attnops_cli.output` and `attnops_cli.noise`; the classes of
`attnops.operations.vanilla`, `attnops.operations.flash` and `attnops.operations.sdpa`; the methods and class attributes
without an underscore of `BaseOperation`, `OperationImpl` and `FlashBackend`; and the contract of
`OperationImpl.__call__`. Everything else may change with any release. A class of another ``api_version`` is not loaded.
"""

ATTENTION: Final = "attention"

_NO_LIMITS = Limits()


class BaseOperation(abc.ABC):
    """An operation with forwards for several platforms; calling it runs the one for the platform of the call.

    A subclass implements `forward_native` and may override `forward_cpu`, `forward_gpu`, `forward_cuda`,
    `forward_rocm`, `forward_tpu` and `forward_tt`. One that is not overridden falls back: cuda and rocm to gpu, the
    rest to native. A forward receives only the options that the caller set; an option that its signature does not name
    is a reason not to run it. ``**options: Unpack[AttentionOptions]`` names all attention options, ``**kwargs`` none.

    Class attributes:
        priority: if several classes serve one name on one platform, the highest is picked; `auto` breaks ties inside
            one `attnops.Rank` by it.
        api_version: the `API_VERSION` that the class was written for, a number.
        computes: the contract that the class computes. ``"attention"``: `auto` may pick it and `explain` lists it. The
            core's operations declare it, and their subclasses inherit it. Another name: `explain` lists the class for
            requests whose class has the same ``computes``. None: something else.
        reads: the fields of the metadata that its forwards read, in addition to ``mode``, ``platform``,
            ``on_unsupported`` and ``interpret``, which the dispatcher reads. A field that is set and not read is a
            reason to refuse a call.
        limits: the limits of each forward ("native", "cpu", "gpu", "cuda", "rocm", "tpu", "tt"). An inherited forward
            has its base class's limits, unless the class declares others.
    """

    priority: ClassVar[int] = 0
    api_version: ClassVar[int] = API_VERSION
    computes: ClassVar[str | None] = None
    reads: ClassVar[frozenset[str]] = frozenset()
    limits: ClassVar[Mapping[str, Limits]] = {}
    metadata: OperationMetadata

    def __init__(self, metadata: OperationMetadata | None = None) -> None:
        self.metadata = OperationMetadata() if metadata is None else metadata

    # Equal operations share decisions and compiled functions; an operation can be a static argument of jax.jit.
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.metadata == other.metadata  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), self.metadata))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.metadata})"

    @classmethod
    @abc.abstractmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        """The name of the operation, or its names."""

    def get_impl_metadata(self) -> OperationMetadata:
        """The metadata that this operation was made with."""
        return self.metadata

    def current_backend(self) -> str:
        """JAX's default backend: ``"cpu"``, ``"gpu"`` or ``"tpu"``. See `explain` for where a call runs."""
        return jax.default_backend()

    @abc.abstractmethod
    def forward_native(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """The computation in plain JAX, for any platform."""

    @fallback
    def forward_cpu(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """The computation for CPUs; `forward_native` unless overridden."""
        return self.forward_native(*args, **kwargs)

    @fallback
    def forward_gpu(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """The computation for NVIDIA and AMD GPUs; `forward_native` unless overridden."""
        return self.forward_native(*args, **kwargs)

    @fallback
    def forward_cuda(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """The computation for NVIDIA GPUs; `forward_gpu` unless overridden."""
        return self.forward_gpu(*args, **kwargs)

    @fallback
    def forward_rocm(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """The computation for AMD GPUs; `forward_gpu` unless overridden."""
        return self.forward_gpu(*args, **kwargs)

    @fallback
    def forward_tpu(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """The computation for TPUs; `forward_native` unless overridden."""
        return self.forward_native(*args, **kwargs)

    @fallback
    def forward_tt(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """The computation for Tenstorrent devices; `forward_native` unless overridden."""
        return self.forward_native(*args, **kwargs)

    def unsupported(self, request: Request) -> Iterable[Reason]:
        """Further reasons not to run this platform's own forward, which `limits` can't express.

        Not called for the native forward. Must depend only on ``request``, the metadata and `environment_key`.
        """
        return ()

    def details(self, request: Request) -> Iterable[str]:
        """Lines for `attnops.explain` on how this platform's own forward serves a request that it can serve.

        They say, for example, which of several kernels runs, and why not a faster one. Traces nothing.
        """
        return ()

    def environment_key(self) -> Hashable:
        """All that `unsupported` depends on besides request and metadata, as part of a cache key.

        An example is the device to compile for. Called for every call, so it must be cheap.
        """
        return None

    @final
    def reasons(self, request: Request) -> list[Reason]:
        """Every reason why this operation's forward for the request's platform can't serve it. Traces nothing."""
        return self.reasons_for(forward_for(type(self), request.platform), request)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Run the forward for the platform of the call.

        Args:
            *args: the forward's positional arguments.
            **kwargs: options, and positional arguments by the names that `forward_native` gives them. ``mode`` is
                the runtime mode: None for the metadata's, else train.

        Raises:
            ValueError: the arguments fit no implementation.
            TypeError: an option that no forward of this operation names.
            UnsupportedError: the forward can't serve the call, and the metadata has ``on_unsupported="error"`` or
                the native forward can't either. A forward may raise it while it is traced, with the same effect;
                raised in a backward pass it reaches the caller.
            PluginError: a method of the class raised, or returned something invalid.
        """
        return self.run(self.prepare(*args, **kwargs))

    def request(self, *args: PyTree, **kwargs: PyTree) -> Request:
        """The static description of a call with these arguments, for `attnops.explain`. Runs nothing.

        Any array may be a `jax.ShapeDtypeStruct` instead; it does not determine the platform, which is then the
        metadata's, or the default backend's.

        Raises:
            ValueError: the arguments fit no implementation.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        shapes = [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
        if not shapes:
            return self.prepare(*args, **kwargs).request
        for shape in shapes:
            if jax.dtypes.canonicalize_dtype(shape.dtype, allow_extended_dtype=True) != shape.dtype:
                raise ValueError(f"{shape} has a dtype that JAX supports only with jax_enable_x64; use another")
        requests: list[Request] = []

        def ask(arrays: list[jax.Array]) -> None:
            given = iter(arrays)
            mixed = [next(given) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves]
            args, kwargs = jax.tree.unflatten(tree, mixed)
            requests.append(self.prepare(*args, **kwargs).request)

        jax.eval_shape(ask, shapes)
        return requests[0]

    @final
    def prepare(self, *args: PyTree, **kwargs: PyTree) -> Call:
        """Bind the arguments of a call and find its platform."""
        call = self.bind(*args, **kwargs)
        platform = find_platform(self.metadata.platform, self.metadata.mesh, jax.tree.leaves(call.args))
        return call._replace(request=call.request.replace(platform=platform))

    def bind(self, *args: PyTree, **kwargs: PyTree) -> Call:
        """Check the arguments and describe the call. The platform is filled in by `prepare`."""
        args, kwargs = by_position(type(self), args, kwargs)
        mode = resolve_mode(self.metadata, 0, kwargs.pop("mode", None))
        self._check_options(kwargs)
        options = {name: value for name, value in kwargs.items() if value is not None}
        arrays = [x for x in jax.tree.leaves((args, options)) if hasattr(x, "dtype")]
        dtypes = {dtype_name(x) for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)}
        request = Request(
            options=frozenset(options), mode=mode, interpret=self.metadata.interpret, dtypes=tuple(sorted(dtypes))
        )
        return Call(request, args, options)

    def run(self, call: Call) -> PyTree:
        """Decide which forward serves a call that `prepare` described, and run it."""
        forward = decide(self, call.request)
        try:
            result = self._run(forward, call)
        except UnsupportedError as error:  # raised by a forward while it is traced
            may_fall_back = forward != "native" and self.metadata.on_unsupported == "native"
            if not may_fall_back or self.reasons_for("native", call.request):
                raise
            what = "; ".join(map(str, error.reasons)) or str(error)
            result = self._run("native", call)
            warn_once(f"{type(self).__name__}.forward_{forward}", what, 4)  # past this, run and __call__
        return self.finish(call, result)

    def _run(self, forward: str, call: Call) -> PyTree:
        function: Function = getattr(self, f"forward_{forward}")
        if not self._limits(forward).differentiable:
            name = f"{type(self).__name__}.forward_{forward}"
            function = not_differentiable(
                function,
                f"{name} has no backward pass, but was differentiated; call it with mode='train' to run an "
                f"implementation that has one",
            )
        options = call.options
        if "mode" in named_options(type(self), forward):
            options = options | {"mode": call.request.mode}
        return self.invoke(forward, function, call, options)

    def invoke(self, forward: str, function: Function, call: Call, options: Mapping[str, object]) -> PyTree:
        """Run the forward of this name on a call."""
        return function(*call.args, **options)

    def finish(self, call: Call, result: PyTree) -> PyTree:
        """Convert a forward's result to the caller's."""
        return result

    def _limits(self, forward: str) -> Limits:
        for cls in type(self).__mro__:
            if forward in vars(cls).get("limits", ()):
                return cls.limits[forward]  # type: ignore[attr-defined]
            if f"forward_{forward}" in vars(cls):
                break  # the class defines the forward, and declares no limits
        return _NO_LIMITS

    def reasons_for(self, forward: str, request: Request) -> list[Reason]:
        """Every reason why a forward, by its name, can't serve a request. Traces nothing.

        A class may override it to add reasons for any forward, including the native one; reasons for a platform's own
        forward belong in `unsupported`.
        """
        return self.own_reasons(forward, request)

    @final
    def own_reasons(self, forward: str, request: Request) -> list[Reason]:
        """The reasons of a forward's signature, its limits, the metadata and `unsupported`."""
        unknown = request.options - named_options(type(self), forward)
        reasons = [
            Reason(option, getattr(request, option, "given"), f"forward_{forward} has no such option")
            for option in sorted(unknown)
        ]
        limits = self._limits(forward)
        # Without declared limits, only the attention contract limits dtypes.
        if limits is not _NO_LIMITS or isinstance(request, AttentionRequest):
            # An option that the forward does not name is refused already: its limits add no reason.
            reasons += [reason for reason in limits.reasons(request) if reason.argument not in unknown]
        reasons += self.metadata.unread(type(self))
        if forward != "native" and not limits.symbolic_reasons(request):
            reasons += border.reasons_of(type(self), "unsupported", lambda: self.unsupported(request))
        return reasons

    def _check_options(self, options: Mapping[str, object], more: frozenset[str] = frozenset()) -> None:
        """Raise a `TypeError` for an option that is neither named by a forward of this class nor in ``more``."""
        known = all_options(type(self)) | more
        for option in options:
            if option not in known:
                listed = sorted(known | {"mode"})
                advice = hint(option, listed)
                raise TypeError(
                    f"{type(self).__name__} has no option {option!r}; it has {listed}{advice and f'; {advice}'}"
                )
