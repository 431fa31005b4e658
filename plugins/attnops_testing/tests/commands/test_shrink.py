"""`attnops check` explains what is wrong: by which features, in the smallest problem that still fails."""

import itertools

import pytest

from attnops.operations.vanilla import VanillaAttention
from attnops_testing.commands.shrink import explain
from attnops_testing.runner import Status, Subject


class Swapped(VanillaAttention):
    """Takes the last kv heads first, with grouped heads."""

    def forward_cpu(self, query, key, value, *, mask=None):
        return self.forward_native(query, key[:, :, ::-1] if key.shape[2] < query.shape[2] else key, value, mask=mask)


class Together(VanillaAttention):
    """Drops the soft cap where there is a mask, of at least 8 keys."""

    def forward_cpu(self, query, key, value, *, mask=None, logits_soft_cap=None, softmax_scale=None):
        dropped = mask is not None and key.shape[1] >= 8
        cap = None if dropped else logits_soft_cap
        return self.forward_native(query, key, value, mask=mask, logits_soft_cap=cap, softmax_scale=softmax_scale)


class Raises(VanillaAttention):
    """Fails with more queries than keys, and in any case with less than three."""

    def forward_cpu(self, query, key, value, *, mask=None):
        if query.shape[1] < 3:
            raise TypeError("too short")
        if query.shape[1] > key.shape[1]:
            raise RuntimeError("too long\nand more")
        return self.forward_native(query, key, value, mask=mask)


def explained(cls, *names, seconds=1e9, **options):
    subject = Subject(operation=cls, mode="prefill")
    outcome = subject.check(names)
    assert outcome.status is Status.WRONG
    return explain(subject, outcome, names, seconds, **options)


@pytest.mark.slow
def test_one_feature_is_named_in_the_smallest_problem():
    found = explained(Swapped, "GQA", "Causal")
    assert (found.name, found.features, found.complete) == ("GQA + Causal", ("GQA",), True)
    # One query attends to one key with weight 1, whichever head it is of.
    assert found.problem == "B1 T2 S2 H4 K2 D1 Dv1 float32"
    assert found.detail.startswith("attention_outputs[0, ")
    assert " but must be " in found.detail


@pytest.mark.slow
def test_two_features_are_named_where_both_are_needed():
    found = explained(Together, "softmax_scale", "soft cap", "Causal")
    assert found.features == ("soft cap", "Causal")
    assert found.problem == "B1 T8 S8 H1 K1 D1 Dv1 float32, logits_soft_cap=1.5, mask=Causal()"


def test_the_same_exception_is_looked_for():
    found = explained(Raises, "T > S", "Causal")
    assert (found.features, found.detail) == (("T > S",), "RuntimeError: too long\nand more")
    assert found.problem == "B1 T3 S1 H1 K1 D1 Dv1 float32"


@pytest.mark.slow
def test_it_ends_when_it_is_late():
    found = explained(Swapped, "GQA", "Causal", seconds=3, clock=itertools.count().__next__)
    assert (found.features, found.complete) == (("GQA",), False)
    assert found.problem.startswith("B2 T40 S40 ")


def test_what_is_not_wrong_by_itself_is_not_explained():
    subject = Subject(operation=Swapped, mode="prefill")
    outcome = subject.check(["GQA"])
    assert explain(subject, outcome, ["Causal"], 10) is None


def test_the_command_prints_it(register, run):
    register("forward_tpu", base=Swapped)  # any member, to make it a class of "acme"
    options = ("check", "zeta", "--platform", "cpu", "--mode", "prefill", "--feature", "GQA")
    result = run(*options)
    assert result.exit_code == 1
    text = "GQA is wrong as stated\nB1 T2 S2 H4 K2 D1 Dv1 float32\n  attention_outputs[0, "
    assert text in result.stdout, result.stdout


@pytest.mark.slow
def test_without_time_the_command_explains_nothing(register, run_json):
    register("forward_tpu", base=Swapped)
    found = run_json("check", "zeta", "--mode", "prefill", "--feature", "GQA", "--shrink", "0", status=1)
    assert (found["features"][0]["status"], found["explained"]) == ("wrong", [])
