"""canonicalize_dtype: an explicit dtype as it is, else what the arguments promote to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops.models.dtypes import canonicalize_dtype

BF16, F16, F32 = (jnp.ones(2, d) for d in (jnp.bfloat16, jnp.float16, jnp.float32))
INT = jnp.arange(2)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((F32,), "float32"),
        ((BF16, None, BF16), "bfloat16"),
        ((BF16, F16), "float32"),
        ((BF16, F32), "float32"),
        ((BF16, 1.5, 2), "bfloat16"),  # Python scalars are weak
        ((BF16, np.float32(1.5)), "float32"),  # NumPy's are not
        ((BF16, INT), "bfloat16"),
        ((INT,), "float32"),
        ((True, None), "float32"),
        ((jnp.ones(2, jnp.int4),), "float32"),
        ((jnp.ones(2, jnp.complex64), BF16), "complex64"),
        ((np.ones(2),), "float32"),  # float64 without x64
        (([1.0, 2.0], BF16), "float32"),  # a sequence is an array, not a weak scalar
        (([BF16, BF16],), "bfloat16"),
        ((jax.ShapeDtypeStruct((2,), jnp.float16),), "float16"),
    ],
)
def test_the_dtype_is_inferred_from_the_arguments(args, expected):
    assert canonicalize_dtype(*args) == jnp.dtype(expected)


def test_integers_stay_integers_where_they_may():
    assert canonicalize_dtype(INT, inexact=False) == jnp.int32
    assert canonicalize_dtype(np.ones(2, np.int8), jnp.ones(2, jnp.uint8), inexact=False) == jnp.int16


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "float16", np.dtype("float32"), jnp.complex64, jnp.float8_e4m3fn])
def test_an_explicit_dtype_is_returned_unmodified(dtype):
    assert canonicalize_dtype(INT, dtype=dtype) is dtype
    assert canonicalize_dtype(dtype=dtype) is dtype


def test_an_explicit_integer_is_refused_unless_asked_for():
    with pytest.raises(ValueError, match=r"Dtype must be inexact: int32 is neither floating nor complex"):
        canonicalize_dtype(F32, dtype=jnp.int32)
    with pytest.raises(ValueError, match="Dtype must be inexact: bool"):
        canonicalize_dtype(F32, dtype=bool)
    assert canonicalize_dtype(F32, dtype=jnp.int32, inexact=False) is jnp.int32


def test_nothing_to_infer_from_is_refused():
    with pytest.raises(ValueError, match=r"none of the 2 args is an array.*pass dtype"):
        canonicalize_dtype(None, None)


@pytest.mark.slow
def test_only_dtypes_are_read():
    big = np.ones(4)
    with jax.transfer_guard("disallow_explicit"):
        with pytest.raises(Exception, match=r"[Dd]isallowed"):  # the guard is awake
            jax.device_put(big)
        assert canonicalize_dtype(big, BF16, [big, big]) == jnp.float32
    assert jax.eval_shape(lambda x: jnp.zeros(1, canonicalize_dtype(x, 1.0)), BF16).dtype == jnp.bfloat16
