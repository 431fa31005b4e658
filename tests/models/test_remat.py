"""Checkpoint policies: which is which, what each keeps, and that a wrong call says how to make a right one."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops.models.remat import LOGSUMEXP_NAME, OUTPUT_NAME, get_gradient_checkpoint_policy, tag

PLAIN = [
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
]
NAMES_FACTORIES = ["save_only_these_names", "save_any_names_but_these", "save_anything_except_these_names"]
FACTORIES = [
    *NAMES_FACTORIES,
    "save_from_both_policies",
    "offload_dot_with_no_batch_dims",
    "save_and_offload_only_these_names",
]


def forward(q, k):
    # The logarithm is this toy kernel's mark: how often it occurs is how often the kernel runs.
    lse = jnp.log(jnp.exp(q @ k.T).sum(-1, keepdims=True))
    return jnp.exp(q @ k.T - lse) @ k, lse


def backward(residuals, g):
    q, k, out, lse = residuals
    p = jnp.exp(q @ k.T - lse)
    ds = p * (g @ k.T - (g * out).sum(-1, keepdims=True))
    return ds @ k, ds.T @ q + p.T @ g


def tagged_inside(q, k):
    out, lse = forward(q, k)
    out, lse = tag(out, OUTPUT_NAME), tag(lse, LOGSUMEXP_NAME)
    return out, (q, k, out, lse)


def untagged(q, k):
    out, lse = forward(q, k)
    return out, (q, k, out, lse)


def kernel(rule):
    attention = jax.custom_vjp(lambda q, k: rule(q, k)[0])
    attention.defvjp(rule, backward)
    return attention


def gradient(policy, attention=None):
    attention = attention or kernel(tagged_inside)

    def layer(w, x):
        return (attention(jnp.tanh(x @ w), x) ** 2).sum()  # tanh marks the projection

    return jax.grad(jax.checkpoint(layer, policy=policy))


W, X = (jax.random.normal(jax.random.key(i), (4, 4)) for i in range(2))


def runs(policy, attention=None):
    """How often the attention and the projection run in a forward and backward pass."""
    text = str(jax.make_jaxpr(gradient(policy, attention))(W, X))
    return text.count("= log "), text.count("= tanh ")


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_policy_is_jaxs_own(name):
    assert get_gradient_checkpoint_policy(name) is getattr(jax.checkpoint_policies, name)


def test_every_policy_of_jax_has_its_name_here():
    assert {n for n in vars(jax.checkpoint_policies) if not n.startswith("_")} <= {*PLAIN, *FACTORIES}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (("everything_saveable",), (1, 1)),
        (("nothing_saveable",), (2, 2)),
        (("save_attention",), (1, 2)),
        (("save_only_these_names", OUTPUT_NAME, LOGSUMEXP_NAME), (1, 2)),
        (("save_only_these_names", OUTPUT_NAME), (2, 2)),  # the logsumexp alone is enough to need the kernel again
        (("save_any_names_but_these", "other"), (1, 2)),
        (("save_any_names_but_these", LOGSUMEXP_NAME), (2, 2)),
        (("save_from_both_policies", "save_attention", "everything_saveable"), (1, 1)),
        (("save_from_both_policies", jax.checkpoint_policies.nothing_saveable, "save_attention"), (1, 2)),
    ],
    ids=lambda x: "-".join(getattr(part, "__name__", str(part)) for part in x),
)
def test_a_policy_runs_again_what_it_does_not_save(policy, expected):
    assert runs(get_gradient_checkpoint_policy(*policy)) == expected


def test_a_tag_outside_the_forward_rule_names_another_value():
    attention = kernel(untagged)
    assert runs(get_gradient_checkpoint_policy("save_attention"), lambda q, k: tag(attention(q, k), OUTPUT_NAME)) == (
        2,
        2,
    )


@pytest.mark.slow
def test_a_policy_does_not_change_the_gradient():
    expected = jax.grad(lambda w: (jax.nn.softmax(jnp.tanh(X @ w) @ X.T) @ X).__pow__(2).sum())(W)
    for name in ("nothing_saveable", "save_attention", "everything_saveable"):
        np.testing.assert_allclose(gradient(get_gradient_checkpoint_policy(name))(W, X), expected, rtol=1e-4, atol=1e-5)


def test_a_tag_keeps_the_tree_and_its_values():
    tree = {"out": W, "lse": (X, jnp.arange(3))}
    out = tag(tree, OUTPUT_NAME)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(tree), strict=True))
    assert str(jax.make_jaxpr(lambda x: tag(x, OUTPUT_NAME))(W)).count(f"name={OUTPUT_NAME}") == 1


def test_programs_with_offloading_policies_can_be_traced():
    dots = get_gradient_checkpoint_policy("offload_dot_with_no_batch_dims", "device", "pinned_host")
    names = get_gradient_checkpoint_policy(
        "save_and_offload_only_these_names",
        names_which_can_be_saved=[LOGSUMEXP_NAME],
        names_which_can_be_offloaded=[OUTPUT_NAME],
        offload_src="device",
        offload_dst="pinned_host",
    )
    assert runs(dots)[0] == 2
    assert runs(names) == (1, 2)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_without_arguments_shows_a_call_that_works(name):
    with pytest.raises(ValueError, match=rf'policy "{name}" cannot be made from the arguments') as caught:
        get_gradient_checkpoint_policy(name)
    call = str(caught.value).split("for example ")[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert callable(eval(call, {"get_gradient_checkpoint_policy": get_gradient_checkpoint_policy}))


@pytest.mark.parametrize("name", NAMES_FACTORIES)
def test_a_list_is_not_taken_for_a_name(name):
    with pytest.raises(ValueError, match="each a separate string"):
        get_gradient_checkpoint_policy(name, (OUTPUT_NAME, LOGSUMEXP_NAME))


def test_a_name_is_not_taken_for_a_list():
    with pytest.raises(ValueError, match="names_which_can_be_offloaded must be a list of names"):
        get_gradient_checkpoint_policy(
            "save_and_offload_only_these_names",
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=OUTPUT_NAME,
            offload_src="device",
            offload_dst="pinned_host",
        )


def test_one_policy_is_not_two():
    with pytest.raises(ValueError, match=r'\("save_from_both_policies", "save_attention", "dots'):
        get_gradient_checkpoint_policy("save_from_both_policies", "save_attention")
    with pytest.raises(ValueError, match="a policy is a callable or a name"):
        get_gradient_checkpoint_policy("save_from_both_policies", "save_attention", None)


def test_a_plain_policy_takes_no_arguments():
    with pytest.raises(ValueError, match=r'"save_attention" takes no arguments and was given \(\'x\'\)'):
        get_gradient_checkpoint_policy("save_attention", "x")


def test_names_that_jax_does_not_read_are_said_so():
    with pytest.warns(UserWarning, match=rf'reads no names: it saves everything, "{OUTPUT_NAME}" included'):
        policy = get_gradient_checkpoint_policy("save_anything_except_these_names", OUTPUT_NAME)
    assert runs(policy) == (1, 1)  # the day this fails, JAX reads them and the warning can go


def test_an_unknown_name_lists_near_ones():
    with pytest.raises(
        ValueError, match="unknown gradient checkpoint policy 'nothing_savable'; did you mean \"nothing_"
    ):
        get_gradient_checkpoint_policy("nothing_savable")
    with pytest.raises(ValueError, match=r'the known ones are "everything_saveable", .*"save_attention"'):
        get_gradient_checkpoint_policy("zzz")
