"""`flywheel_tpu.flash_attn_func` of flywheel-tpu, by Pallas's interpreter of TPUs."""
# /// script
# requires-python = ">=3.12"
# dependencies = ["flywheel-tpu==0.3.0", "jax==0.12.0.1"]
# ///

import jax
from jax._src import tpu_info

tpu_info.registry["cpu"] = lambda: tpu_info.get_tpu_info_for_chip(tpu_info.ChipVersion.TPU_V6E, 1)
jax.default_backend = lambda *_: "tpu"  # it asks for the device
from flywheel_tpu import flash_attn_interface as flywheel  # noqa: E402
from worker import Refused  # noqa: E402

FRAMEWORK, PACKAGE = "jax", "flywheel-tpu"
LINK = "https://pypi.org/project/flywheel-tpu/"
SIZE = {"length": 128, "head_dim": 128, "dtype": "bfloat16"}
CONVENTIONS = {}


def attend(q, k, v, *, causal=False, window=None, segments=None, scale=None, soft_cap=None, lse=False, dropout=0.0):
    window = (-1, -1) if window is None else tuple(window)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    options = {
        "softmax_scale": scale, "window_size": window, "softcap": soft_cap or 0.0, "dropout_p": dropout,
        "return_softmax_lse": lse, "causal": causal, "interpret": True,
    }  # fmt: skip
    if segments is not None:
        raise Refused("packed documents are a call of another function, forward alone: not probed")
    out = flywheel.flash_attn_func(q, k, v, **options)
    return (out[0].swapaxes(1, 2), out[1]) if lse else out.swapaxes(1, 2)
