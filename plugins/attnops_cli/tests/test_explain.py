"""`attnops explain`: what it prints, and its exit status."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import attnops
from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, Dense
from attnops_cli.installed import FOR_PLATFORM
from attnops_cli.masks import parse_mask, parse_shape

pytestmark = pytest.mark.usefixtures("core_alone")


def test_explain_has_sensible_defaults(run_json: Any) -> None:
    found = run_json("explain", "vanilla", "-T", "32", "-H", "6", "-D", "80")
    shape = ("batch", "query_length", "key_length", "heads", "kv_heads", "head_dim", "value_head_dim")
    assert [found["request"][name] for name in shape] == [1, 32, 32, 6, 6, 80, 80]
    assert (found["request"]["mode"], found["request"]["dtypes"]) == ("train", ["float32"] * 3)
    assert (found["chosen"]["name"], found["chosen"]["forward"]) == ("attnops:vanilla", "native")
    assert run_json("explain", "--query-length", "1")["request"]["mode"] == "decode"


def test_explain_knows_every_option(run_json: Any) -> None:
    found = run_json(
        "explain", "vanilla", "--batch", "2", "--query-length", "16", "--key-length", "24", "--heads", "4",
        "--kv-heads", "2", "--head-dim", "8", "--value-head-dim", "12", "--dtype", "bfloat16", "--platform", "tpu",
        "--mode", "prefill", "--mask", "causal", "--bias", "2x1x16x24", "--soft-cap", "30", "--scale", "0.5",
        "--sinks", "--dropout", "0.25", "--return-lse", "--return-weights",
        "--return-max-logits", "--interpret",
    )  # fmt: skip
    expected = {
        "platform": "tpu", "mode": "prefill", "interpret": True, "batch": 2, "query_length": 16, "key_length": 24,
        "heads": 4, "kv_heads": 2, "head_dim": 8, "value_head_dim": 12, "dtypes": ["bfloat16"] * 3,
        "mask_kinds": ["Causal"], "bias_kind": "array", "bias_shape": [2, 1, 16, 24], "bias_dtype": "bfloat16",
        "softmax_scale": 0.5, "logits_soft_cap": 30.0, "sinks": True, "dropout_prob": 0.25, "return_lse": True,
        "return_max_logits": True,
        "return_weights": True,
    }  # fmt: skip
    assert {name: found["request"][name] for name in expected} == expected


def test_explain_asks_what_the_library_asks(run: Any) -> None:
    q = jax.numpy.zeros((1, 64, 8, 64))
    operation = OperationRegistry.create("sdpa", OperationMetadata(platform="cuda"))
    expected = str(attnops.explain(operation.request(q, q, q, mask=Causal()), "sdpa"))
    result = run("explain", "sdpa", "--query-length", "64", "--platform", "cuda", "--mask", "causal")
    assert result.exit_code == 0
    assert result.output.startswith(expected + "\n")  # and what to install, if no plugin for GPUs is
    assert "although dtype=float32: must be one of ['bfloat16', 'float16']" in result.output


def test_explain_describes_a_cache(run: Any, run_json: Any) -> None:
    arguments = (
        "explain", "vanilla", "-B", "2", "-T", "1", "-S", "4096", "-H", "8", "-K", "2", "-D", "64", "--dtype",
        "bfloat16", "--source", "PagedCache", "--source-options", "page_size=32, codec=int8, scales=head",
    )  # fmt: skip
    found = run_json(*arguments)
    assert found["request"]["source"] == {
        "storage": "PagedCache", "codec": "int8", "scales": "head", "latent": False, "page_size": 32,
        "width": 128, "joined": True, "has_loader": True,
        "is_packed": False, "rows": 2, "mask_kinds": [], "mask_primitives": [],
    }  # fmt: skip
    assert (found["request"]["mode"], found["request"]["key_length"]) == ("decode", 4096)
    # 2 rows of 4,096 slots of 2 heads of 64 + 64 features of 2 bytes
    assert 2 * 4096 * 2 * (64 + 64) * 2 == 4_194_304
    reads = (
        "reads the cache into arrays by cache.read(), 4.2 MB a call: cache=PagedCache: VanillaAttention has no reader "
        "of caches for native"
    )
    assert found["chosen"]["source_use"]["reads"] == reads
    printed = run(*arguments).output.splitlines()
    assert printed[3] == f"  {reads}"


def test_explain_describes_latent_and_packed_caches(run_json: Any) -> None:
    sizes = ("-B", "3", "-T", "5", "-S", "40", "-K", "2", "-D", "24")
    found = run_json(
        "explain", "vanilla", *sizes, "--source", "windowcache", "--source-options", "latent=16,packed=true"
    )["request"]
    assert found["source"]["storage"] == "WindowCache"
    assert (found["source"]["latent"], found["source"]["is_packed"]) == (True, True)
    assert (found["batch"], found["key_length"], found["value_head_dim"], found["mode"]) == (1, 120, 16, "prefill")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--source-options", "codec=int8"], "--source-options='codec=int8' needs a source"),
        (["--source", "sparse"], "source='sparse' is unknown; use one of ['DenseCache', 'PagedCache', 'WindowCache']"),
        (["--source", "DenseCache", "--source-options", "16"], "must be name=value, separated by commas"),
        (["--source", "DenseCache", "--source-options", "pages=4"], "source_options names pages, but a DenseCache has"),
        (["--source", "DenseCache", "--source-options", "latent=no"], "latent=no must be an integer of at least 1"),
        (["--source", "DenseCache", "--source-options", "packed=1"], "packed='1' must be true or false"),
        (["--source", "DenseCache", "--source-options", "page_size=16"], "given, but a DenseCache has no pages"),
        (["--source", "DenseCache", "--source-options", "scales=head"], "scales='head' is given, but codec is not"),
        (["--source", "DenseCache", "--source-options", "codec=int5"], "must be one of"),
        (["--source", "PagedCache", "-S", "40", "-T", "1"], "S=40 must be a multiple of page_size=16"),
        (["--source", "WindowCache", "-S", "4", "-T", "5"], "S=4 slots do not hold the T=5 tokens"),
        (["--source", "DenseCache", "--source-options", "latent=32", "--value-head-dim", "16"], "latent=32 must be at"),
        (["--source", "DenseCache", "--dropout", "0.5"], "attention over a cache has no dropout"),
    ],
)
def test_explain_refuses_what_no_cache_is(run: Any, arguments: list[str], sentence: str) -> None:
    result = run("explain", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr


def test_explain_makes_no_array(run_json: Any) -> None:
    """A million tokens, whose mask alone would be a terabyte."""
    found = run_json("explain", "--query-length", str(2**20), "--mask", f"1x1x{2**20}x{2**20}")
    assert found["request"]["mask_shape"] == [1, 1, 2**20, 2**20]


def test_explain_gives_every_reason_of_a_refusal(run: Any, run_json: Any) -> None:
    arguments = ("explain", "sdpa", "--sinks", "--soft-cap", "30", "--platform", "cpu", "--strict")
    result = run(*arguments)
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert lines[0].startswith("attnops:sdpa can't serve B1 T1024 S1024 H8 K8 D64 Dv64 float32 train on cpu with ")
    assert lines[1:3] == [
        "  - logits_soft_cap=30.0: forward_cpu has no such option",
        "  - sinks=True: forward_cpu has no such option",
    ]
    assert "attnops:vanilla: could serve it" in lines[3:]

    found = run_json(*arguments, status=1)
    assert (found["chosen"], found["error"]) == (None, lines[0])
    assert [(reason["argument"], reason["value"]) for reason in found["reasons"]] == [
        ("logits_soft_cap", "30.0"),
        ("sinks", "True"),
    ]
    assert "attnops:vanilla" in {other["name"] for other in found["others"] if other["serves"]}


def test_explain_gives_ranks_in_json(run_json: Any) -> None:
    found = run_json("explain", "--platform", "cpu")
    reason = "plain JAX that is laid out for this platform"
    assert found["chosen"]["rank"] == {"name": "NATIVE_LAYOUT", "place": 6, "reason": reason}
    (vanilla,) = (other for other in found["others"] if other["name"] == "attnops:vanilla")
    assert (vanilla["rank"]["name"], vanilla["rank"]["place"]) == ("REFERENCE", 11)


def test_explain_keeps_what_plugins_print_out_of_its_output(run: Any, run_json: Any, register: Any) -> None:
    register(rank=classmethod(lambda cls, request: print("hello")))
    assert run_json("explain", "vanilla")["chosen"]["name"] == "attnops:vanilla"
    assert run("explain", "vanilla").stderr == "hello\n"


def test_explain_gives_the_reasons_of_the_others(run: Any, register: Any) -> None:
    register("forward_cpu")
    result = run("explain", "vanilla", "--mask", "causal", "--return-lse")
    assert "\nacme:zeta: can't serve it\n  - mask=" in result.output
    assert "\n  - return_lse=True: forward_cpu has no such option" in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["vanila"], "impl_name='vanila' is not an installed operation; installed are "),
        (["vanila"], "did you mean 'vanilla'"),
        (["--platform", "abacus"], "platform='abacus' is unknown; use one of "),
        (["--mode", "idle"], "mode='idle' is not a runtime mode; use one of "),
        (["--dtype", "float33"], "dtype='float33' is unknown; use float32, bfloat16 or float16"),
        (["--dtype", "float64"], "dtype='float64', but must be float32, bfloat16 or float16"),
        (["--dtype", "int8"], "query has dtype int8, but must be floating-point; cast it"),
        (["--heads", "8", "--kv-heads", "3"], "query has 8 heads and key has 3: the kv heads must divide the heads"),
        (["--mask", "caussal"], "mask='caussal' is unknown; write an expression of Ancestors, Blocks"),
        (["--mask", "7x1024"], "mask has shape (7, 1024), but must be 4-D"),
        (["--bias", "wide"], "bias='wide' is not a shape; write it as 4x1x128x128"),
        (["--dropout", "1.5"], "dropout_prob=1.5 must lie in [0, 1); use 0.0 for no dropout"),
        (["--soft-cap", "-1"], "logits_soft_cap=-1.0 must be positive, from"),
    ],
)
def test_explain_prints_an_error_as_a_sentence(run: Any, arguments: list[str], sentence: str) -> None:
    result = run("explain", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("attnops: ")
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_masks_are_read_as_expressions() -> None:
    assert parse_shape("bias", "(4, 1,8)") == parse_shape("bias", "4x1x8") == (4, 1, 8)
    assert parse_mask("causal") == parse_mask("Causal()") == Causal()
    assert parse_mask("causal(offset=3)") == parse_mask("Causal(3)") == Causal(3)
    assert parse_mask("Causal((2,))").offset.shape == (2,)
    assert parse_mask("1x1x2x3").shape == (1, 1, 2, 3)
    assert isinstance(parse_mask("Dense((1, 1, 2, 3))"), Dense)
    for text in ("Causal(", "__import__('os')", "Causal(print)", "1 + 2", "Causal(1, 2, 3, 4)"):
        with pytest.raises(ValueError, match=r"^mask="):
            parse_mask(text)


def test_explain_names_what_has_kernels_for_a_platform_and_is_not_installed(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FOR_PLATFORM, "cuda", "acme-kernels")
    hint = "acme-kernels has kernels for cuda: pip install acme-kernels"
    lines = run("explain", "sdpa", "--platform", "cuda", "--soft-cap", "30").output.splitlines()
    assert lines[-1] == hint
    assert "although" in lines[2]
    assert "rank" not in lines[3]  # of a forward that does not run
    assert hint not in run("explain", "--platform", "cpu").output
