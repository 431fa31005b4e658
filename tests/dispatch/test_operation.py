"""Which forward runs where: forwards that record themselves tell."""

import re
import warnings

import jax
import jax.numpy as jnp
import pytest

from attnops import (
    BaseOperation,
    Limits,
    NotDifferentiableError,
    OperationImpl,
    OperationMetadata,
    OperationOutput,
    OperationRegistry,
    PluginError,
    Reason,
    UnsupportedError,
    UnsupportedWarning,
    explain,
)
from attnops.dispatch.forwards import forward_for
from attnops.dispatch.platforms import PLATFORMS, find_platform, platform_of
from attnops.masks import Causal, Segments

FORWARDS = ("native", "cpu", "gpu", "cuda", "rocm", "tpu", "tt")
CHAIN = {
    "cpu": ["cpu", "native"],
    "cuda": ["cuda", "gpu", "native"],
    "rocm": ["rocm", "gpu", "native"],
    "tpu": ["tpu", "native"],
    "tt": ["tt", "native"],
}


def recorder(*forwards, base=BaseOperation, **members):
    """A class with the given forwards, each of which returns its own name."""

    def method(name):
        return lambda self, *args: name

    names = {f"forward_{name}": method(name) for name in forwards}
    return type("Recorder", (base,), {"get_impl_name": classmethod(lambda cls: "recorder"), **names, **members})


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("bits", range(2 ** (len(FORWARDS) - 1)))
def test_every_set_of_overrides_on_every_platform(platform, bits):
    overridden = ["native"] + [name for i, name in enumerate(FORWARDS[1:]) if bits >> i & 1]
    operation = recorder(*overridden)(OperationMetadata(platform=platform))
    expected = next(name for name in CHAIN[platform] if name in overridden)
    assert operation(1.0) == expected
    assert forward_for(type(operation), platform) == expected
    # A forward that is called by hand falls back in the same way.
    assert getattr(operation, f"forward_{platform}")(1.0) == expected


def test_a_subclass_inherits_and_overrides():
    parent = recorder("native", "gpu", "tpu")
    child = recorder("rocm", base=parent)
    grandchild = recorder("native", base=child)
    results = {p: grandchild(OperationMetadata(platform=p))(0) for p in PLATFORMS}
    assert results == {"cpu": "native", "cuda": "gpu", "rocm": "rocm", "tpu": "tpu", "tt": "native"}


def test_forward_native_is_required():
    with pytest.raises(TypeError, match="forward_native"):
        recorder("cpu")()


class TestPlatform:
    class Device:
        def __init__(self, platform, version=""):
            self.platform = platform
            self.client = type("Client", (), {"platform_version": version})()

    @pytest.mark.parametrize(
        ("platform", "version", "expected"),
        [
            ("cpu", "", "cpu"),
            ("gpu", "PJRT C API\ncuda 13.0", "cuda"),
            ("gpu", "PJRT C API\nrocm 70000", "rocm"),
            ("cuda", "", "cuda"),
            ("rocm", "", "rocm"),
            ("tpu", "", "tpu"),
            ("tt", "", "tt"),
            ("neuron", "", "cpu"),
        ],
    )
    def test_the_platform_of_a_device_is_told_by_its_version(self, platform, version, expected):
        assert platform_of(self.Device(platform, version)) == expected

    def test_the_first_that_names_a_platform_decides(self, monkeypatch):
        """Metadata, mesh, committed arrays, jax_default_device, default backend: the first that says so."""
        gpu = self.Device("gpu", "cuda 13")
        monkeypatch.setattr(jax, "local_devices", lambda backend=None: [gpu])
        cpu = jax.devices("cpu")[0]
        array = jnp.ones(3)
        committed = jax.device_put(array, cpu)
        mesh = jax.sharding.Mesh([cpu], ("x",))
        assert find_platform(None, None, [array]) == "cuda"  # a process whose default is a GPU
        assert find_platform(None, None, [array, committed]) == "cpu"
        assert find_platform(None, mesh, [array]) == "cpu"
        with jax.set_mesh(mesh):
            assert find_platform(None, None, [array]) == "cpu"
            assert jax.jit(lambda x: find_platform(None, None, [x]) == "cpu")(array)
        with jax.default_device(cpu):
            assert find_platform(None, None, [array]) == "cpu"
        assert find_platform("tpu", mesh, [committed]) == "tpu"

    def test_gpu_stands_for_cuda_and_rocm(self, monkeypatch):
        assert OperationMetadata(platform="gpu").platform == "cuda"
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "devices", lambda: [self.Device("gpu", "rocm 7")])
        assert OperationMetadata(platform="gpu").platform == "rocm"


def attention(**members):
    """An attention operation whose TPU kernel has few options; forwards name themselves in the output."""

    class Kernel(OperationImpl):
        @classmethod
        def get_impl_name(cls):
            return "kernel"

        def forward_native(self, query, key, value, *, mask=None, logits_soft_cap=None):
            return OperationOutput(jnp.zeros_like(query))

        def forward_tpu(self, query, key, value, *, mask=None):
            return OperationOutput(jnp.ones_like(query))

    for name, value in members.items():
        setattr(Kernel, name, value)
    return Kernel


Q = jnp.ones((1, 4, 2, 8))


def ran_tpu(operation, *args, **options):
    return bool((operation(*args, **options).attention_outputs == 1).all())


class TestUnsupported:
    def test_an_option_that_the_forward_does_not_name(self):
        kernel = attention()
        operation = kernel(OperationMetadata(platform="tpu"))
        assert ran_tpu(operation, Q, Q, Q)
        with pytest.warns(UnsupportedWarning, match=r"logits_soft_cap=2.0: forward_tpu has no such option"):
            assert not ran_tpu(operation, Q, Q, Q, logits_soft_cap=2.0)
        # Once a distinct reason, and where the caller can see it.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not ran_tpu(operation, Q, Q, Q, logits_soft_cap=2.0)

    def test_the_warning_points_at_the_call(self):
        operation = attention()(OperationMetadata(platform="tpu"))
        with pytest.warns(UnsupportedWarning) as caught:
            operation(Q, Q, Q, logits_soft_cap=2.5)
        assert [warning.filename for warning in caught] == [__file__]

    def test_a_value_that_is_not_hashable(self):
        kernel = attention(unsupported=lambda self, request: [Reason("pages", [1, 2], "must be even")])
        with pytest.warns(UnsupportedWarning, match=r"pages=\[1, 2\]: must be even"):
            assert not ran_tpu(kernel(OperationMetadata(platform="tpu")), Q, Q, Q)

    def test_error_lists_all_reasons(self):
        kernel = attention(limits={"tpu": Limits(max_head_dim=4, dtypes=frozenset({"bfloat16"}))})
        operation = kernel(OperationMetadata(platform="tpu", on_unsupported="error"))
        with pytest.raises(UnsupportedError) as caught:
            operation(Q, Q, Q, logits_soft_cap=2.0)
        arguments = [reason.argument for reason in caught.value.reasons]
        assert arguments == ["logits_soft_cap", "dtype", "head_dim"]  # a line a fact, whatever it is a fact of
        assert "head_dim=8: must be at most 4" in str(caught.value)
        assert "dtype=float32: must be one of ['bfloat16']" in str(caught.value)

    def test_what_neither_forward_can_serve_is_refused_with_both_reasons(self):
        operation = attention()(OperationMetadata(platform="tpu"))
        with pytest.raises(UnsupportedError, match=r"sinks=True: forward_native has no such option \(native forward\)"):
            operation(Q, Q, Q, sinks=jnp.ones(2))

    def test_refused_before_anything_is_traced(self):
        def forward_tpu(self, query, key, value):
            raise AssertionError("traced")

        kernel = attention(forward_tpu=forward_tpu, limits={"tpu": Limits(head_dim_multiple=16)})
        with pytest.warns(UnsupportedWarning, match="head_dim=8: must be a multiple of 16; pad it with zeros"):
            assert not ran_tpu(kernel(OperationMetadata(platform="tpu")), Q, Q, Q)

    def test_the_class_may_refine(self):
        def unsupported(self, request):
            if request.query_length % 128:
                yield Reason("T", request.query_length, "must be a multiple of 128", "pad it")

        kernel = attention(unsupported=unsupported)
        with pytest.raises(UnsupportedError, match="T=4: must be a multiple of 128; pad it"):
            kernel(OperationMetadata(platform="tpu", on_unsupported="error"))(Q, Q, Q)
        assert not ran_tpu(kernel(OperationMetadata(platform="cpu", on_unsupported="error")), Q, Q, Q)

    def test_catch_all_keywords_name_nothing(self):
        def forward_tpu(self, query, key, value, **ignore):
            return OperationOutput(jnp.ones_like(query))

        kernel = attention(forward_tpu=forward_tpu)
        with pytest.raises(UnsupportedError, match="mask=Dense"):
            kernel(OperationMetadata(platform="tpu", on_unsupported="error"))(
                Q, Q, Q, mask=jnp.ones((1, 1, 4, 4), bool)
            )

    def test_the_metadatas_scale_and_cap_count_as_set(self):
        metadata = OperationMetadata(platform="tpu", on_unsupported="error", logits_soft_cap=3.0, softmax_scale=0.5)
        with pytest.raises(UnsupportedError) as caught:
            attention()(metadata)(Q, Q, Q)
        assert [r.argument for r in caught.value.reasons] == ["logits_soft_cap", "softmax_scale"]

    def test_options_of_ones_own(self):
        def forward_tpu(self, query, key, value, *, pages=None):
            return OperationOutput(query * 0 + pages)

        kernel = attention(forward_tpu=forward_tpu)
        assert ran_tpu(kernel(OperationMetadata(platform="tpu")), Q, Q, Q, pages=1)
        with pytest.raises(TypeError, match=r"has no option 'page'; it has .*'pages'"):
            kernel(OperationMetadata(platform="tpu"))(Q, Q, Q, page=1)
        with pytest.raises(UnsupportedError, match="pages=given: forward_native has no such option"):
            kernel(OperationMetadata(platform="cpu"))(Q, Q, Q, pages=1)

    def test_a_kind_of_mask_that_is_not_declared_is_refused(self):
        kernel = attention(limits={"tpu": Limits(mask_kinds=frozenset({"Causal"}))})
        operation = kernel(OperationMetadata(platform="tpu", on_unsupported="error"))
        with pytest.raises(UnsupportedError, match="can't evaluate Dense"):
            operation(Q, Q, Q, mask=jnp.ones((1, 1, 4, 4), bool))


class TestMalformed:
    """A class that would be wrong in silence, or harm others, is refused when it is registered."""

    @pytest.mark.parametrize(
        ("members", "text"),
        [
            ({"limits": {"TPU": Limits()}}, "has limits for 'TPU', which is not a forward; use one of ['cpu', 'cuda'"),
            ({"limits": {"cuda": Limits()}}, "has limits for 'cuda', but does not override forward_cuda"),
            ({"limits": {"tpu": {"max_head_dim": 4}}}, "has limits['tpu']={'max_head_dim': 4}, which must be an"),
            ({"limits": None}, "has limits=None, which must map forwards to attnops.Limits"),
            ({"priority": "high"}, "has priority='high', which must be an int"),
            ({"computes": "Attention"}, "has computes='Attention', which must be 'attention' or None"),
            (
                {"reads": "mesh"},
                "has reads='mesh', which must be a set of fields of OperationMetadata: ['axis_rules', ",
            ),
            (
                {"option_axes": {"decay": "H"}},
                "has option_axes={'decay': 'H'}, which must map options to letters of 'b'",
            ),
            ({"option_axes": {"decya": "h"}}, "has option_axes for ['decya'], which must be options of its forwards"),
            (
                {"option_axes": {"mask": "h"}},
                "has option_axes for ['mask'], which must be options of its forwards that",
            ),
            ({"option_axes": "h"}, "has option_axes='h', which must map options to letters of 'b', 'h', 'k' and '-'"),
        ],
    )
    def test_a_malformed_class_is_refused(self, members, text):
        with pytest.raises(TypeError, match=re.escape(text)):
            OperationRegistry.register(attention(**members))

    def test_an_inherited_forward_keeps_its_limits(self):
        parent = attention(limits={"tpu": Limits(head_dim_multiple=16), "native": Limits(max_head_dim=4)})
        child = type("Child", (parent,), {"limits": {"native": Limits()}})
        forward = {"forward_tpu": lambda self, query, key, value: OperationOutput(jnp.ones_like(query))}
        grandchild = type("Grandchild", (child,), forward)
        metadata = OperationMetadata(platform="tpu", on_unsupported="error")
        with pytest.raises(UnsupportedError, match="head_dim=8: must be a multiple of 16"):
            child(metadata)(Q, Q, Q)
        assert ran_tpu(grandchild(metadata), Q, Q, Q)  # a forward of its own, which has no such limit
        assert not ran_tpu(grandchild(metadata.replace(platform="cpu")), Q, Q, Q)

    def test_limits_take_dtypes_and_any_collection(self):
        limits = Limits(dtypes=[jnp.bfloat16, "float16"], mask_kinds=["Causal"])
        assert limits == Limits(dtypes=frozenset({"bfloat16", "float16"}), mask_kinds=frozenset({"Causal"}))
        assert hash(limits)
        with pytest.raises(ValueError, match="head_dim_multiple=0 must be an int of at least 1"):
            Limits(head_dim_multiple=0)

    def test_a_forward_that_gives_less_than_was_asked_for(self):
        def forward_native(self, query, key, value, *, return_lse=False, return_weights=False):
            return OperationOutput(query)

        operation = attention(forward_native=forward_native)()
        assert operation(Q, Q, Q).logsumexp is None
        with pytest.raises(TypeError, match="was asked for logsumexp with return_lse=True, but returned None"):
            operation(Q, Q, Q, return_lse=True)
        with pytest.raises(TypeError, match="was asked for attention_weights with return_weights=True"):
            operation(Q, Q, Q, return_weights=True)
        operation = attention(forward_native=lambda self, query, key, value: query)()
        with pytest.raises(TypeError, match="Kernel returned a ArrayImpl, but must return OperationOutput"):
            operation(Q, Q, Q)


class TestInterpret:
    def test_runs_the_platforms_forward_here(self):
        seen = []

        def forward_tpu(self, query, key, value):
            seen.append(self.metadata.interpret)
            return OperationOutput(jnp.ones_like(query))

        operation = attention(forward_tpu=forward_tpu)(OperationMetadata(platform="tpu", interpret=True))
        assert ran_tpu(operation, Q, Q, Q)
        assert seen == [True]

    def test_interpret_is_refused_without_an_interpreter(self):
        kernel = attention(limits={"tpu": Limits(interpretable=False)})
        with pytest.raises(UnsupportedError, match="interpret=True: this kernel has no interpreter"):
            kernel(OperationMetadata(platform="tpu", interpret=True, on_unsupported="error"))(Q, Q, Q)


class TestWithoutBackward:
    def make(self, **metadata):
        kernel = attention(limits={"tpu": Limits(differentiable=False)})
        return kernel(OperationMetadata(platform="tpu", **metadata))

    @pytest.mark.parametrize("mode", ["prefill", "decode", "insert"])
    def test_serves_these_modes(self, mode):
        operation = self.make(mode=mode, on_unsupported="error")
        assert ran_tpu(operation, Q, Q, Q)
        assert (jax.jit(operation)(Q, Q, Q).attention_outputs == 1).all()
        assert (jax.vmap(operation)(Q[None], Q[None], Q[None]).attention_outputs == 1).all()

    def test_refuses_to_train(self):
        with pytest.raises(UnsupportedError, match="has no backward pass and serves prefill, decode and insert only"):
            self.make(on_unsupported="error")(Q, Q, Q)
        with pytest.warns(UnsupportedWarning, match="has no backward pass"):
            assert not ran_tpu(self.make(), Q, Q, Q)

    def test_raises_when_differentiated(self):
        operation = self.make(mode="prefill")
        with pytest.raises(NotDifferentiableError, match=r"Kernel.forward_tpu has no backward pass"):
            jax.grad(lambda q: operation(q, Q, Q).attention_outputs.sum())(Q)


class TestAutoAndExplain:
    @pytest.mark.slow
    def test_auto_picks_what_serves(self):
        operation = OperationRegistry.create("auto")
        request = operation.request(Q, Q, Q)
        assert explain(request).chosen.name == "attnops:flash"
        assert explain(request.replace(platform="tt")).chosen.name == "attnops:sdpa"
        # Where scores of T × S would not fit, what needs no such memory.
        assert explain(request.replace(platform="tt", query_length=1 << 16, key_length=1 << 16)).chosen.name == (
            "attnops:flash"
        )
        capped = operation.request(Q, Q, Q, logits_soft_cap=2.0)
        explanation = explain(capped)
        assert explanation.chosen.name == "attnops:flash"
        sdpa = next(other for other in explanation.others if other.name == "attnops:sdpa")
        assert [str(reason) for reason in sdpa.reasons] == ["logits_soft_cap=2.0: forward_cpu has no such option"]
        assert "attnops:sdpa: can't serve it" in str(explanation)
        direct = OperationRegistry.create("flash")(Q, Q, Q, logits_soft_cap=2.0).attention_outputs
        assert (operation(Q, Q, Q, logits_soft_cap=2.0).attention_outputs == direct).all()

    def test_explain_a_named_operation(self):
        request = OperationRegistry.create("auto").request(Q, Q, Q).replace(platform="cuda")
        explanation = explain(request, "sdpa")
        assert (explanation.chosen.name, explanation.chosen.forward) == ("attnops:sdpa", "native")
        assert "although dtype=float32: must be one of ['bfloat16', 'float16']" in str(explanation)
        with pytest.raises(UnsupportedError):
            explain(request.replace(dtypes=("float8_e4m3fn",) * 3), "sdpa")

    def test_a_request_of_shapes_equals_one_of_arrays(self):
        """Arrays need not be there: those of a million tokens and their bias would not fit anywhere."""
        operation = OperationRegistry.create("auto", OperationMetadata(dropout_prob=0.5))
        options = {"mask": Causal() & Segments(jnp.zeros((1, 4), jnp.int32)), "dropout_key": jax.random.key(0)}
        shape = jax.ShapeDtypeStruct(Q.shape, Q.dtype)
        assert operation.request(shape, shape, Q, **options) == operation.request(Q, Q, Q, **options)
        million, bias = (jax.ShapeDtypeStruct((1, *dims), jnp.bfloat16) for dims in ((1 << 20, 8, 64), (8, 1, 1 << 20)))
        request = operation.request(million, million, million, bias=bias, dropout_key=jax.random.key(0))
        assert (request.query_length, request.dtypes[0]) == (1 << 20, "bfloat16")
        with pytest.raises(ValueError, match=r"they must be equal"):
            operation.request(shape, million, million)
        with pytest.raises(ValueError, match=r"only with jax_enable_x64"):
            operation.request(jax.ShapeDtypeStruct(Q.shape, "float64"), Q, Q)
        key = jax.eval_shape(lambda: jax.random.key(0))
        assert operation.request(Q, Q, Q, dropout_key=key) == operation.request(Q, Q, Q, dropout_key=jax.random.key(0))
        with pytest.raises(TypeError, match=r"query is a ShapeDtypeStruct, which only `request` accepts"):
            operation(shape, Q, Q, dropout_key=jax.random.key(0))

    def test_what_nothing_serves_is_refused_with_each_reason(self):
        operation = OperationRegistry.create("auto")
        x = jnp.ones((1, 4, 2, 8), jnp.float8_e4m3fn)
        with pytest.raises(UnsupportedError, match=r"attnops:vanilla: dtype=float8_e4m3fn: must be one of"):
            operation(x, x, x)

    def test_disabled_operations_are_named_where_nothing_is_left(self, monkeypatch):
        request = OperationRegistry.create("auto").request(Q, Q, Q)
        others = {plugin.name for plugin in OperationRegistry.plugins()} - {"attnops:auto"}
        with monkeypatch.context() as patch:
            for names, text in (
                (",".join(sorted(others)), "attnops:sdpa is disabled: ATTNOPS_DISABLE names attnops:sdpa"),
                ("attnops", "'auto' can't be used:\n  - attnops:auto is disabled"),
            ):
                patch.setenv("ATTNOPS_DISABLE", names)
                OperationRegistry.refresh()
                with pytest.raises((UnsupportedError, PluginError), match=text):
                    explain(request)
        OperationRegistry.refresh()
