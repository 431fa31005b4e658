"""What the README prints is true; its table is checked by `make lint`, which has every plugin."""

import re
from pathlib import Path

import pytest

from attnops import OperationRegistry

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code(after: str, language: str = "python") -> str:
    """The first block of code of a language after a text."""
    return re.search(rf"```{language}\n(.*?)```", README[README.index(after) :], re.DOTALL)[1]


@pytest.mark.slow
def test_the_examples_print_what_the_readme_says(capsys, monkeypatch):
    plugins = OperationRegistry.plugins

    def of_the_core(**options):
        return [plugin for plugin in plugins(**options) if plugin.distribution == "attnops"]

    monkeypatch.setattr(OperationRegistry, "plugins", of_the_core)
    names = {}
    for title in ("# attnops", "The same operation decodes"):
        exec(compile(code(title), "README.md", "exec"), names)
        assert capsys.readouterr().out == code(title, "text")


@pytest.mark.slow
def test_caches_work_as_printed():
    import jax.numpy as jnp
    import numpy as np

    from attnops import OperationMetadata
    from attnops.masks import Causal

    B, T, H, K, D = 2, 5, 4, 2, 8
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(B, T, h, D)), jnp.bfloat16) for h in (H, K, K))
    names = {"op": OperationRegistry.create("vanilla", OperationMetadata()), "Causal": Causal, "lengths": [5, 3]}
    names |= {"B": B, "T": T, "K": K, "D": D, "query": query, "key": key, "value": value}
    exec(compile(code("## Caches"), "README.md", "exec"), names)
    # 0.9 MiB in pages of 16 tokens of 2 heads of 8 + 8 int8 and 2 scales
    assert names["pages"] == int(0.9 * 2**20) // (16 * 2 * (8 + 8 + 2 * 4))
    assert names["pool"].ok.all()
    assert names["cache"].lengths.tolist() == [4, 2]
    assert not names["cache"].overflowed.any()
    plain = names["op"](query, key, value, mask=Causal()).attention_outputs
    np.testing.assert_allclose(names["out"].attention_outputs[0], plain[0], atol=0.05)
    assert not names["out"].attention_outputs[1, 3:].any()
    names |= {"jnp": jnp, "L": 3}
    exec(compile(code("A model has one cache for all its layers"), "README.md", "exec"), names)
    assert names["cache"].lengths.tolist() == [0, 3]


@pytest.mark.slow
def test_frameworks_work_as_printed():
    import jax
    import jax.numpy as jnp

    q = k = v = jnp.ones((1, 4, 2, 8))
    exec(compile(code("## In Flax, jax.nn"), "README.md", "exec"), {"jax": jax, "q": q, "k": k, "v": v})


def test_caches_on_a_mesh_work_as_printed():
    import jax.numpy as jnp
    import numpy as np

    from attnops import OperationMetadata
    from attnops.masks import Causal

    B, T, H, K, D = 2, 5, 4, 2, 8
    q, key, value = (jnp.asarray(np.eye(B * T * h, D).reshape(B, T, h, D), jnp.bfloat16) for h in (H, K, K))
    names = {"B": B, "K": K, "D": D, "q": q, "k": key, "query": q, "key": key, "value": value}
    names |= {"OperationMetadata": OperationMetadata, "OperationRegistry": OperationRegistry, "Causal": Causal}
    exec(compile(code("## On a mesh"), "README.md", "exec"), names)
    exec(compile(code("A cache is created on the mesh"), "README.md", "exec"), names)
    plain = OperationRegistry.create("auto", OperationMetadata())(q, key, value, mask=Causal()).attention_outputs
    np.testing.assert_allclose(names["out"].attention_outputs, plain, atol=0.01)
    assert names["cache"].lengths.tolist() == [T, T]


def test_the_plugin_is_printed_as_it_is_in_the_examples():
    for name, language in (("pyproject.toml", "toml"), ("attnops_mykernel.py", "python")):
        file = (ROOT / "examples" / "plugin" / name).read_text(encoding="utf-8")
        assert code("## Write a plugin", language) == f"# {name}\n{file}"


def test_the_plugin_loads_as_printed():
    from attnops_testing.support_table import support

    namespace = {"__name__": "attnops_mykernel"}
    exec(compile(code("## Write a plugin"), "README.md", "exec"), namespace)
    plugin = namespace["MyAttention"]
    assert support(plugin, "bfloat16", "tpu") == "kernel"
    assert support(plugin, "`Causal`", "tpu") == "kernel"
    assert support(plugin, "float16", "tpu") == "native"
    assert support(plugin, "odd lengths", "tpu") == "native"
    assert support(plugin, "sinks", "tpu") == "native"


def test_the_table_says_how_a_cache_is_read():
    from attnops import Limits, OperationOutput
    from attnops.operations.vanilla import VanillaAttention
    from attnops_caches import CacheLimits, CacheReader
    from attnops_testing.support_table import CACHES, cache_support

    class Reader(CacheReader):
        limits = CacheLimits(storages={"PagedCache"}, codecs={"int8"}, latent=True)

        def attend(self, operation, query, cache, *, mask):
            return OperationOutput(query)

    class Paged(VanillaAttention):
        limits = {  # noqa: RUF012
            "native": VanillaAttention.limits.get("native", Limits()),
            "cuda": Limits(max_head_dim=576),
        }

        readers = {"cuda": Reader()}  # noqa: RUF012

        def forward_cuda(self, query, key, value, *, mask=None):
            return OperationOutput(query)

    assert [cache_support(Paged, feature, "cuda") for feature in CACHES] == [
        "read", "read", "kernel", "read", "read", "kernel", "read",
    ]  # fmt: skip
    assert {cache_support(Paged, feature, "cpu") for feature in CACHES} == {"read"}


def test_the_mesh_is_cut_as_printed():
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from attnops import OperationMetadata

    q, k = jnp.ones((2, 8, 8, 16)), jnp.ones((2, 8, 4, 16))
    namespace = {"OperationMetadata": OperationMetadata, "q": q, "k": k}
    exec(compile(code("## On a mesh"), "README.md", "exec"), namespace)
    assert namespace["specs"].query == P("dp", None, "tp", None)
    assert namespace["specs"].by_key == P("dp", None)


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"])
@pytest.mark.tier(slow=["LICENSE"])
def test_the_house_is_complete(name):
    assert (ROOT / name).stat().st_size > 500
