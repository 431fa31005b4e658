"""An operation that is not softmax attention is held to its author's reference; whatever is planted is found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import BaseOperation, OperationImpl, OperationOutput
from attnops_testing import Conformance, check_against
from attnops_testing.reference import CHECKS, ReferenceSubject
from attnops_testing.runner import Status


def rms_norm(x, weight, eps=1e-6):
    return x * (jnp.mean(x * x, -1, keepdims=True) + eps) ** -0.5 * weight


PROBLEMS = {"plain": lambda rng: ((rng.normal(size=(2, 3, 8)), rng.normal(size=8)), {"eps": 0.25})}


class RMSNorm(BaseOperation):
    @classmethod
    def get_impl_name(cls):
        return "rms_norm"

    def forward_native(self, x, weight, *, eps=1e-6):
        return rms_norm(x.astype(jnp.float32), weight.astype(jnp.float32), eps).astype(x.dtype)


class Linear(OperationImpl):
    """Causal linear attention by a running sum."""

    @classmethod
    def get_impl_name(cls):
        return "linear"

    def forward_native(self, query, key, value, *, decay=None):
        def step(state, now):
            q, k, v = now
            state = state * decay[None, :, None, None] + k[..., :, None] * v[..., None, :]
            return state, jnp.einsum("bhd,bhde->bhe", q, state, precision="highest")

        q, k, v = (x.astype(jnp.float32).swapaxes(0, 1) for x in (query, key, value))
        state = jnp.zeros((*k.shape[1:], v.shape[-1]))
        return OperationOutput(jax.lax.scan(step, state, (q, k, v))[1].swapaxes(0, 1).astype(query.dtype))


def linear_attention(query, key, value, decay):
    distance = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])[None]
    weights = jnp.where(distance >= 0, decay[:, None, None] ** jnp.maximum(distance, 0).astype(decay.dtype), 0)
    scores = jnp.einsum("bthd,bshd->bhts", query, key, precision="highest") * weights
    return jnp.einsum("bhts,bshd->bthd", scores, value, precision="highest")


def linear_problem(rng):
    q, k, v = (rng.normal(size=(1, 6, 2, 3)) for _ in range(3))
    return (q, k, v), {"decay": rng.uniform(0.3, 0.9, 2)}


@pytest.mark.slow
class TestRMSNorm(Conformance):
    operation = RMSNorm
    reference = staticmethod(rms_norm)
    problems = PROBLEMS
    dtypes = ("float32", "bfloat16")


class TestLinearAttention(Conformance):
    operation = Linear
    reference = staticmethod(linear_attention)
    problems = {"decayed": linear_problem}  # noqa: RUF012


def statuses(operation, reference=rms_norm, problems=PROBLEMS, **options):
    outcomes = check_against(operation, reference, problems, **options)
    return {outcome.name.partition("float32 ")[2]: outcome for outcome in outcomes}


@pytest.mark.slow
def test_every_check_is_right_for_a_right_operation():
    assert {x.status for x in statuses(RMSNorm).values()} == {Status.RIGHT}
    assert list(statuses(RMSNorm)) == list(CHECKS)


def planted(forward):
    return type("Planted", (RMSNorm,), {"forward_native": lambda self, x, weight, *, eps=1e-6: forward(x, weight, eps)})


@jax.custom_vjp
def wrong_gradient(x, weight):
    return rms_norm(x, weight, 0.25)


wrong_gradient.defvjp(
    lambda x, w: (rms_norm(x, w, 0.25), (x, w)), lambda kept, g: (g * kept[1], (g * kept[0]).sum((0, 1)))
)


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (lambda x, weight, eps: rms_norm(x, weight), "output 0["),
        (lambda x, weight, eps: rms_norm(x, jnp.ones_like(weight), eps), "output 0["),
        (lambda x, weight, eps: wrong_gradient(x, weight), "gradient of "),
        (lambda x, weight, eps: rms_norm(x, weight, eps).astype(jnp.bfloat16), "output 0 has dtype bfloat16"),
        (lambda x, weight, eps: (rms_norm(x, weight, eps),) * 2, "there are 2 outputs"),
    ],
    ids=["eps dropped", "weight ignored", "gradient", "dtype", "outputs"],
)
@pytest.mark.tier(quick=["outputs"])
def test_what_is_wrong_is_found(forward, text):
    found = statuses(planted(forward))["jit"]
    assert (found.status, text in found.detail) == (Status.WRONG, True), found


def test_what_is_wrong_under_vmap_alone_is_found():
    @jax.custom_batching.custom_vmap
    def norm(x, weight):
        return rms_norm(x, weight, 0.25)

    @norm.def_vmap
    def _first_slice_for_all(size, batched, x, weight):
        return jnp.stack([rms_norm(x[0], weight[0], 0.25)] * size), True

    found = statuses(planted(lambda x, weight, eps: norm(x, weight)), gradients=False)
    wrong = [name for name, outcome in found.items() if outcome.status is Status.WRONG]
    assert wrong == ["vmap"]


@pytest.mark.slow
def test_a_problem_that_can_not_fail_is_found():
    blind = {"blind": lambda rng: ((np.zeros((2, 8)) + 0 * rng.normal(size=(2, 8)), rng.normal(size=8)), {"eps": 0.25})}
    found = statuses(RMSNorm, problems=blind)["negative control"]
    assert found.status is Status.WRONG
    assert "changes no output of this problem" in found.detail


def test_a_reference_that_casts_is_refused():
    found = statuses(RMSNorm, reference=lambda x, w, eps: rms_norm(x.astype(jnp.float32), w.astype(jnp.float32), eps))
    assert "must compute in the dtype of its arguments" in found["jit"].detail


@pytest.mark.slow
def test_what_the_operation_refuses_is_refused():
    subject = ReferenceSubject(operation=Linear, reference=lambda *x, **o: linear_attention(*x, o["decay"]))

    def unknown(rng):
        arguments, options = linear_problem(rng)
        return arguments, options | {"mask": np.ones((1, 1, 6, 6), bool)}

    outcome = subject.check(unknown, "jit")
    assert (outcome.status, "forward_native has no such option" in outcome.detail) == (Status.REFUSED, True)
