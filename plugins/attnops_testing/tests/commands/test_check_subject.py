"""`attnops check` names what it checks, refuses to check another thing, and fits its problems to the kernel."""

import dataclasses
import json
from typing import ClassVar

import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import attnops_cli
from attnops import Limits, OperationImpl, OperationMetadata, OperationRegistry, Reason
from attnops.dispatch.plugins import Plugin, State
from attnops.masks import Segments, SlidingWindow
from attnops.operations.vanilla import VanillaAttention
from attnops_testing.caches import cache_problem
from attnops_testing.commands.check import _heading
from attnops_testing.pairs import sampled_pairs
from attnops_testing.runner import NothingToCheckError, Status, Subject


@pytest.fixture(autouse=True)
def _registered_here():
    registered = OperationRegistry._registered[:]
    yield
    OperationRegistry._registered[:] = registered
    OperationRegistry.refresh()


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(attnops_cli.make_app(), ["check", *arguments])


class Zeta(VanillaAttention):
    """A kernel of 16-bit numbers, lengths that are multiples of 128 and head dims of 64."""

    limits: ClassVar = {
        "tpu": Limits(
            dtypes=frozenset({"bfloat16"}), head_dim_multiple=64, equal_head_dims=True, bias_kinds=None,
            mask_kinds={"Causal", "SlidingWindow", "Segments", "&"},
        )
    }  # fmt: skip

    @classmethod
    def get_impl_name(cls):
        return "zeta"

    def forward_tpu(self, query, key, value, *, mask=None):
        return self.forward_native(query, key, value, mask=mask)

    def unsupported(self, request):
        for name, length in (("T", request.query_length), ("S", request.key_length)):
            if length % 128:
                yield Reason(name, length, "must be a multiple of 128", "pad it")


def register(cls):
    cls.__module__ = "acme.zeta"
    return OperationRegistry.register(cls)


def test_a_platform_that_only_the_core_serves_is_status_2():
    broken = Plugin("acme-zeta", "1.0", "vanilla", "acme.zeta:Zeta", State.FAILED, "importing it raised OSError: gone")
    OperationRegistry._registered.append(broken)
    OperationRegistry._forget()
    with pytest.warns(match="acme-zeta:vanilla can't be used"):
        result = run("vanilla", "--platform", "tpu", "--interpret")
    assert result.exit_code == 2
    assert "no installed plugin overrides forward_tpu for 'vanilla'; `attnops doctor` says whether yours loads" in (
        result.stderr
    )
    assert "\n  - acme-zeta:vanilla is failed: importing it raised OSError: gone" in result.stderr


def test_a_plugin_that_failed_is_reported_though_no_platform_is_stated():
    broken = Plugin("acme-zeta", "1.0", "vanilla", "acme.zeta:Zeta", State.FAILED, "importing it raised OSError: gone")
    OperationRegistry._registered.append(broken)
    OperationRegistry._forget()
    with pytest.warns(match="acme-zeta"), pytest.raises(NothingToCheckError, match="raised OSError: gone"):
        Subject(operation="vanilla").require_kernel()
    Subject(operation="attnops:vanilla").require_kernel()


def test_a_kernel_of_another_platform_is_status_2():
    register(Zeta)
    with pytest.raises(NothingToCheckError, match=r"zeta\.Zeta does not override forward_cpu"):
        Subject(operation="zeta").require_kernel()
    Subject(operation="zeta", platform="tpu").require_kernel()


@pytest.mark.slow
def test_problems_fit_the_kernel():
    subject = Subject(operation=register(Zeta), platform="tpu")
    fit = subject.fit
    assert (fit.dtype, fit.multiple, fit.block, fit.D) == ("bfloat16", 128, 128, 64)
    assert not subject.reasons([])
    assert not subject.reasons(["T < S", "GQA"])
    assert [r.argument for r in subject.reasons(["odd lengths"])] == ["T", "S"]
    assert {"GQA", "Causal", "Segments", "mask & mask"} <= set(subject.served)
    assert subject.check(["GQA"]).status is Status.RIGHT
    assert subject.long.fit.tokens(2, 0.5) == 640


def test_a_dtype_that_is_asked_for_is_checked():
    subject = Subject(operation="attnops:vanilla", dtype="bfloat16")
    assert subject.problem([]).query.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="dtype='int8' must be one of"):
        Subject(operation="attnops:vanilla", dtype="int8")


@pytest.mark.slow
def test_json_names_the_subject_and_low_coverage_warns(few):
    names = ("GQA", "softmax_scale", "sinks", "soft cap", "weights", "logsumexp", "dropout")
    few(feature=names, behaviour=[], memory_growth=[], long=[])
    register(Zeta)
    result = run("zeta", "--platform", "tpu", "--interpret", "--all", "--pairs", "none", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["operation"], found["function"]) == ("acme:zeta", "acme.zeta.Zeta.forward_tpu")
    assert "test_check_subject.py:" in found["file"]
    assert (found["problem"]["dtype"], found["problem"]["multiple"]) == ("bfloat16", 128)
    assert "attnops: only 1 of 7 features are served" in result.stderr


@pytest.mark.slow
def test_single_features_are_checked_by_name():
    result = run("attnops:vanilla", "--feature", "GQA + Segments", "--feature", "Causal")
    assert result.exit_code == 0, result.output
    assert "GQA + Segments  right" in result.stdout
    assert result.stdout.endswith("3 right, 0 refused, 0 wrong, 0 not run\n")  # GQA + Segments in a long problem too
    for arguments, text in (
        (("causal",), "did you mean 'Causal'"),
        (("vmapp",), "did you mean 'vmap'"),
        (("GQA + MQA",), "exclude each other"),
    ):
        result = run("vanilla", "--feature", *arguments)
        assert (result.exit_code, text in result.stderr) == (2, True), result.stderr


class Planted(VanillaAttention):
    """Right but for a window in any tile of 128 keys after the first, and for segments under GQA."""

    @classmethod
    def get_impl_name(cls):
        return "planted"

    def forward_cpu(self, query, key, value, *, mask=None):
        if isinstance(mask, SlidingWindow) and query.shape[1] > 128:
            mask = dataclasses.replace(mask, left=min(mask.left, 127))
        if isinstance(mask, Segments) and key.shape[2] < query.shape[2]:
            mask = None
        return self.forward_native(query, key, value, mask=mask)


@pytest.mark.slow
def test_a_window_wrong_beyond_one_tile_is_found_in_long_problems():
    subject = Subject(operation=Planted)
    assert subject.check(["SlidingWindow"]).status is Status.RIGHT
    assert subject.long.check(["SlidingWindow"]).status is Status.WRONG
    assert subject.long.check(["T < S", "Causal"]).status is Status.RIGHT


def test_segments_ignored_under_gqa_are_found_by_the_sample():
    subject = Subject(operation=Planted)
    assert subject.check(["Segments"]).status is Status.RIGHT
    assert ("GQA", "Segments") in sampled_pairs()
    assert [x.status for x in subject.check_pairs(("GQA", "Segments"))] == [Status.WRONG]


@pytest.mark.slow
def test_fields_of_the_metadata_are_honoured_or_refused():
    subject = Subject(
        operation="attnops:vanilla", metadata=OperationMetadata(runtime_dtype="bfloat16", softmax_scale=0.3)
    )
    problem = subject.problem(["logsumexp"])
    assert (problem.metadata.runtime_dtype, problem.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert subject.check(["logsumexp"]).status is Status.RIGHT
    plain = Subject(operation="attnops:vanilla")
    assert problem.oracle_options["softmax_scale"] == 0.3
    assert "softmax_scale" not in {k for k, v in plain.problem([]).oracle_options.items() if v is not None}
    with pytest.raises(ValueError, match=r"metadata\.mode='__prefill__', but mode='train' is checked"):
        Subject(operation="attnops:vanilla", metadata=OperationMetadata(mode="prefill"))


def test_what_is_not_declared_to_be_attention_is_status_2():
    class Linear(OperationImpl):
        @classmethod
        def get_impl_name(cls):
            return "linear"

        def forward_native(self, query, key, value):
            raise NotImplementedError

    register(Linear)
    result = run("linear")
    assert result.exit_code == 2
    assert "acme:linear does not declare that it computes softmax attention" in result.stderr
    assert "attnops_testing.check_against compares an operation with another reference" in result.stderr


def test_a_stated_head_dim_leaves_tiles_to_the_kernel():
    subject = Subject(operation="attnops:flash", dtype="bfloat16", head_dim=64)
    assert (subject.fit.D, subject.fit.dtype, subject.long.fit) == (64, "bfloat16", subject.fit)
    problem = subject.problem(["Causal"])
    assert problem.inputs["query"].shape[1::2] == (320, 64)
    for metadata in (problem.metadata, cache_problem(subject, []).metadata):
        assert (metadata.block_q, metadata.block_k) == (None, None)
    assert "T = 320, in the operation's own tiles" in _heading(subject)
    with pytest.raises(ValueError, match="head_dim=0 must be at least 1"):
        Subject(operation="attnops:flash", head_dim=0)
    plain = Subject(operation="attnops:flash").problem(["Causal"])
    assert (plain.inputs["query"].shape[1::2], plain.metadata.block_q) == ((40, 16), 16)
