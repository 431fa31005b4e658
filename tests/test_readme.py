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


def test_the_example_prints_what_the_readme_says(capsys, monkeypatch):
    plugins = OperationRegistry.plugins

    def of_the_core(**options):
        return [plugin for plugin in plugins(**options) if plugin.distribution == "attnops"]

    monkeypatch.setattr(OperationRegistry, "plugins", of_the_core)
    exec(compile(code("# attnops"), "README.md", "exec"), {})
    assert capsys.readouterr().out == code("# attnops", "text")


def test_the_plugin_is_printed_as_it_is_in_the_examples():
    for name, language in (("pyproject.toml", "toml"), ("attnops_mykernel.py", "python")):
        file = (ROOT / "examples" / "plugin" / name).read_text(encoding="utf-8")
        assert code("## Write a plugin", language) == f"# {name}\n{file}"


def test_the_plugin_loads_as_printed():
    from attnops.testing.support_table import support

    namespace = {"__name__": "attnops_mykernel"}
    exec(compile(code("## Write a plugin"), "README.md", "exec"), namespace)
    plugin = namespace["MyAttention"]
    assert support(plugin, "bfloat16", "tpu") == "kernel"
    assert support(plugin, "`Causal`", "tpu") == "kernel"
    assert support(plugin, "float16", "tpu") == "native"
    assert support(plugin, "odd lengths", "tpu") == "native"
    assert support(plugin, "sinks", "tpu") == "native"


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
def test_the_house_is_complete(name):
    assert (ROOT / name).stat().st_size > 500
