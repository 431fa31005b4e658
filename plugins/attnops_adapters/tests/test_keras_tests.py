"""The tests that Keras ships of its attention layers, with `attnops_adapters.keras` in place of Keras' attention."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

os.environ["KERAS_BACKEND"] = "jax"

import pytest
from keras.src import backend

# Their classes are not imported by name: pytest would run them, too, without marks.
from keras.src.layers.attention import grouped_query_attention_test, multi_head_attention_test

from attnops_adapters.keras import use

pytestmark = pytest.mark.slow

# Those of values. The others, of shapes, errors, initialisers and saved models, take long and compute little attention.
OF_VALUES = ("masking", "causal", "query_mask", "sliding_window", "correctness")

calls = 0


@pytest.fixture(autouse=True, scope="module")
def flash() -> Iterator[None]:
    with use("flash", on_unsupported="error"):
        attend = backend.nn.dot_product_attention

        @functools.wraps(attend)
        def counted(*args, **options):
            global calls
            calls += 1
            return attend(*args, **options)

        backend.nn.dot_product_attention = counted
        yield
        backend.nn.dot_product_attention = attend


def of(tests: type) -> type:
    """Keras' class of tests, those that are not of values exhaustive."""

    def marked(name: str):
        found = getattr(tests, name)

        @functools.wraps(found)
        def test(self):
            before = calls
            found(self)
            if "correctness" in name and "disable" not in name:
                assert calls > before, "Keras did not call attnops' function"

        return test if any(word in name for word in OF_VALUES) else pytest.mark.exhaustive(test)

    names = [name for name in dir(tests) if name.startswith("test_") and name != "test_session"]
    return type(tests.__name__, (tests,), {name: marked(name) for name in names})


TestMultiHead = of(multi_head_attention_test.MultiHeadAttentionTest)
TestGroupedQuery = of(grouped_query_attention_test.GroupedQueryAttentionTest)
