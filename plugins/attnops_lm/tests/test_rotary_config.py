"""Rotary frequencies against transformers' values and a float64 derivation; reading a model's config."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from attnops_lm.rotary import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    RotaryConfig,
    RotaryScaling,
    YarnScaling,
    inverse_frequencies,
)

# Made by transformers 5.23.0 and torch:
#   config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=4096,
#                        rope_parameters={"rope_theta": 10000.0, "rope_type": ..., ...})
#   inv_freq, attention_scaling = ROPE_INIT_FUNCTIONS[rope_type](config, None, seq_len=seq_len)
# fmt: off
TRANSFORMERS = [
    ({"rope_type": "linear", "factor": 4.0}, None,
     [0.25, 0.079056941, 0.0250000004, 0.00790569466, 0.00249999994, 0.000790569466, 0.000250000012, 7.90569466e-05],
     1.0),
    ({"rope_type": "dynamic", "factor": 2.0}, 4096,
     [1.0, 0.316227764, 0.100000001, 0.0316227786, 0.00999999978, 0.00316227786, 0.00100000005, 0.000316227786],
     1.0),
    ({"rope_type": "dynamic", "factor": 2.0}, 10000,
     [1.0, 0.260517091, 0.0678691566, 0.0176810753, 0.00460622227, 0.00119999971, 0.000312620425, 8.14429659e-05],
     1.0),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, None,
     [1.0, 0.316227764, 0.0812500045, 0.0197642371, 0.00437500002, 0.000790569466, 0.000250000012, 7.90569466e-05],
     1.138629436111989),
    ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024}, None,
     [1.0, 0.316227764, 0.0812500045, 0.0197642371, 0.00437500002, 0.000790569466, 0.000250000012, 7.90569466e-05],
     1.138629436111989),
    ({"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
      "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1}, None,
     [1.0, 0.316227764, 0.100000001, 0.0239147246, 0.00512499968, 0.000849862176, 2.49999994e-05, 7.90569447e-06],
     1.0857263992561355),
    ({"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}, None,
     [1.0, 0.316227764, 0.100000001, 0.0277359355, 0.00555275427, 0.000738276867, 3.12500015e-05, 9.88211832e-06],
     1.3465735902799727),
    ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024, "attention_factor": 1.5}, None,
     [1.0, 0.316227764, 0.078125, 0.0177878123, 0.00343749998, 0.000395284733, 0.000125000006, 3.95284733e-05],
     1.5),
    ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024, "beta_fast": 2, "beta_slow": 2,
      "truncate": False}, None,
     [1.0, 0.316227764, 0.100000001, 0.0316227786, 0.00124999997, 0.000395284733, 0.000125000006, 3.95284733e-05],
     1.2079441541679836),
    # The ramp ends beyond the last of the 8 pairs.
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 131072}, None,
     [1.0, 0.316227764, 0.100000001, 0.0316227786, 0.00999999978, 0.00316227786, 0.000812500017, 0.000197642366],
     1.138629436111989),
    ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 1024, "low_freq_factor": 1.0,
      "high_freq_factor": 4.0}, None,
     [1.0, 0.316227764, 0.100000001, 0.0316227786, 0.00308676064, 0.000395284733, 0.000125000006, 3.95284733e-05],
     1.0),
]
# fmt: on
LLAMA = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096, "rope_theta": 10000.0}


@pytest.mark.parametrize(("parameters", "seq_len", "expected", "scaling"), TRANSFORMERS)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_frequencies_equal_transformers(key, parameters, seq_len, expected, scaling):
    config = RotaryConfig.from_config({**LLAMA, key: parameters})
    frequencies, factor = inverse_frequencies(config, seq_len=seq_len)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, expected, rtol=5e-7)
    assert factor == pytest.approx(scaling, rel=1e-12)


def plain64(base, dim):
    return np.array([1.0 / base ** (2 * i / dim) for i in range(dim // 2)])


def dynamic64(base, dim, *, factor, trained, length):
    grown = base * (factor * max(length, trained) / trained - (factor - 1)) ** (dim / (dim - 2))
    return plain64(grown, dim)


def yarn64(base, dim, *, factor, trained, fast=32, slow=1):
    """The paper's equations 17 to 23, pair by pair."""
    plain = plain64(base, dim)
    index_of = [dim * math.log(trained / (2 * math.pi * turns)) / (2 * math.log(base)) for turns in (fast, slow)]
    low, high = max(math.floor(index_of[0]), 0), min(math.ceil(index_of[1]), dim - 1)
    out = []
    for i, frequency in enumerate(plain):
        interpolated = min(max((i - low) / (high - low), 0), 1)
        out.append(frequency / factor * interpolated + frequency * (1 - interpolated))
    return np.array(out)


def llama64(base, dim, *, factor, trained, low=1, high=4):
    """As Meta published it: by wavelengths, case by case."""
    out = []
    for frequency in plain64(base, dim):
        wavelength = 2 * math.pi / frequency
        if wavelength < trained / high:
            out.append(frequency)
        elif wavelength > trained / low:
            out.append(frequency / factor)
        else:
            smooth = (trained / wavelength - low) / (high - low)
            out.append((1 - smooth) * frequency / factor + smooth * frequency)
    return np.array(out)


DYNAMIC = DynamicNTKScaling(factor=3.0, max_position_embeddings=2048)
YARN = YarnScaling(factor=8.0, original_max_position_embeddings=4096)
LLAMA3 = Llama3Scaling(factor=8.0, original_max_position_embeddings=8192)
SCALED = [
    (RotaryScaling(), plain64),
    (LinearScaling(factor=2.5), lambda base, dim: plain64(base, dim) / 2.5),
    (DYNAMIC, partial(dynamic64, factor=3.0, trained=2048, length=5000)),
    (YARN, partial(yarn64, factor=8.0, trained=4096)),
    (LLAMA3, partial(llama64, factor=8.0, trained=8192)),
]


@pytest.mark.parametrize(("scaling", "reference"), SCALED, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize(("base", "dim"), [(1e4, 64), (5e5, 128), (1e6, 6)])
def test_frequencies_equal_a_float64_derivation(scaling, reference, base, dim):
    config = RotaryConfig(head_dim=128, rotary_dim=dim, base=base, scaling=scaling)
    np.testing.assert_array_max_ulp(
        inverse_frequencies(config, seq_len=5000)[0], reference(base, dim).astype(np.float32)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RotaryConfig(head_dim=15), "rotary_dim=15 must be even and from 2 to head_dim=15"),
        (lambda: RotaryConfig(head_dim=16, rotary_dim=18), "rotary_dim=18 must be even and from 2 to head_dim=16"),
        (lambda: RotaryConfig(head_dim=16, rotary_dim=0), "rotary_dim=0 must be even"),
        (lambda: RotaryConfig(head_dim=16, base=1.0), "base=1.0 must be > 1"),
        (lambda: LinearScaling(factor=0.0), "LinearScaling: factor=0.0 must be > 0"),
        (lambda: replace(YARN, original_max_position_embeddings=0), "original_max_position_embeddings=0 must be > 0"),
        (lambda: replace(LLAMA3, high_freq_factor=1.0), "low_freq_factor=1.0 must be below high_freq_factor=1.0"),
    ],
)
def test_impossible_configurations_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, RotaryConfig(head_dim=16, rotary_dim=16)),
        ({**LLAMA, "rope_scaling": None, "head_dim": 32}, RotaryConfig(head_dim=32, rotary_dim=32)),
        # The spellings of GPT-J, GPT-NeoX, Phi, DeepSeek, transformers 5, Qwen's YaRN and InternLM.
        (
            {"n_embd": 4096, "n_head": 16, "n_positions": 2048, "rotary_dim": 64},
            RotaryConfig(head_dim=256, rotary_dim=64),
        ),
        (
            {"hidden_size": 512, "num_attention_heads": 8, "rotary_pct": 0.25, "rotary_emb_base": 20000},
            RotaryConfig(head_dim=64, rotary_dim=16, base=20000),
        ),
        ({**LLAMA, "partial_rotary_factor": 0.5}, RotaryConfig(head_dim=16, rotary_dim=8)),
        (
            {**LLAMA, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "rope_interleave": True},
            RotaryConfig(head_dim=64, rotary_dim=64, interleaved=True),
        ),
        (
            {**LLAMA, "head_dim": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            RotaryConfig(head_dim=16, rotary_dim=16, base=5e5),
        ),
        (
            {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
            RotaryConfig(
                head_dim=16,
                rotary_dim=16,
                scaling=YarnScaling(factor=4.0, original_max_position_embeddings=1024),
            ),
        ),
        (
            {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            RotaryConfig(
                head_dim=16, rotary_dim=16, scaling=DynamicNTKScaling(factor=2.0, max_position_embeddings=4096)
            ),
        ),
    ],
)
def test_configs_are_read(config, expected):
    assert RotaryConfig.from_config(config) == expected
    assert RotaryConfig.from_config(SimpleNamespace(**config)) == expected


def test_parameters_that_differ_by_layer():
    config = {
        **LLAMA,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    full = RotaryConfig.from_config(config, layer_type="full_attention")
    assert full == RotaryConfig(head_dim=16, rotary_dim=16, base=1e6, scaling=LinearScaling(factor=8.0))
    assert RotaryConfig.from_config(config, layer_type="sliding_attention").base == 1e4
    with pytest.raises(ValueError, match=r"layer_type=None must be one of \['full_attention', 'sliding_attention'\]"):
        RotaryConfig.from_config(config)


def test_overrides_win_and_replace_what_cannot_be_read():
    config = {**LLAMA, "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}
    read = RotaryConfig.from_config(config, scaling=LinearScaling(factor=2.0), head_dim=32, interleaved=True)
    assert read == RotaryConfig(head_dim=32, rotary_dim=32, scaling=LinearScaling(factor=2.0), interleaved=True)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"rope_type": "longrope"},
            r"rope_type='longrope' must be one of \['default', 'dynamic', 'linear', 'llama3', 'yarn'\]",
        ),
        ({"type": "ntk"}, "rope_type='ntk' must be one of"),
        (
            {"rope_type": "default", "mrope_section": [2, 3, 3]},
            r"reads only \[\] and the config also gives \['mrope_sec",
        ),
        ({"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}, r"the config also gives \['alpha'\]"),
        ({"rope_type": "linear"}, r"rope_type='linear' needs \['factor'\], which the config does not give"),
    ],
)
def test_parameters_that_would_be_misread_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        RotaryConfig.from_config({**LLAMA, "rope_scaling": parameters})


def test_a_config_without_sizes_is_refused():
    with pytest.raises(ValueError, match=r"neither head_dim nor hidden_size and num_attention_heads; pass head_dim="):
        RotaryConfig.from_config({"hidden_size": 64})


def test_a_config_whose_numbers_differ_by_layer():
    with pytest.raises(ValueError, match=r"config's num_attention_heads=\[4, 8\] must be one number; where layers"):
        RotaryConfig.from_config({"hidden_size": 64, "num_attention_heads": [4, 8]})
    with pytest.raises(ValueError, match=r"config's head_dim=\[16, 32\] must be one number"):
        RotaryConfig.from_config({"head_dim": [16, 32]})
    with pytest.raises(ValueError, match=r"config's rope_theta='big' must be one number"):
        RotaryConfig.from_config({"head_dim": 16, "rope_theta": "big"})
    assert RotaryConfig.from_config({"hidden_size": 64, "num_attention_heads": [4, 4]}).head_dim == 16
    assert RotaryConfig.from_config({"num_attention_heads": [4, 8]}, head_dim=8).head_dim == 8


def test_a_multimodal_config_is_read_through_its_text_config():
    text = {"head_dim": 16, "rope_theta": 500.0}
    assert RotaryConfig.from_config({"text_config": text, "hidden_size": 3}) == RotaryConfig.from_config(text)
