"""ONNX's Attention (opset 23; 24 for lengths) by onnxruntime on the CPU."""
# /// script
# dependencies = ["onnxruntime==1.32.0", "onnx==1.23.2", "ml_dtypes"]
# ///

import numpy as np
import onnx
import onnxruntime
from onnx import helper

FRAMEWORK, PACKAGE = "numpy", "onnxruntime"
LINK = "https://onnx.ai/onnx/operators/onnx__Attention.html"
GRADIENTS = False
CONVENTIONS = {
    "aligned top left": "“query `i` attends key `j` iff `j <= i + offset` … `offset = 0` … (the no-cache case, …)”",
}
REFUSES = {
    "bias and mask": "one argument for both: add the mask to the bias",
    "second derivatives": "it is forward alone",
    "vmap": "it has no transformations",
}
TYPES = {"float32": 1, "float16": 10, "bool": 9, "int64": 7, "bfloat16": 16}


def attend(q, k, v, *, causal=False, mask=None, bias=None, lengths=None, scale=None, soft_cap=None):
    q, k, v = (np.swapaxes(x, 1, 2) for x in (q, k, v))
    given = {"Q": q, "K": k, "V": v}
    if mask is not None or bias is not None:
        given["attn_mask"] = mask if bias is None else bias
    names = list(given)
    if lengths is not None:
        names = [*names, *[""] * (6 - len(names)), "nonpad_kv_seqlen"]
        given["nonpad_kv_seqlen"] = lengths.astype(np.int64)
    options = {"scale": scale, "softcap": soft_cap, "is_causal": int(causal)}
    node = helper.make_node("Attention", names, ["Y"], **{x: y for x, y in options.items() if y is not None})
    inputs = [helper.make_tensor_value_info(x, TYPES[str(y.dtype)], y.shape) for x, y in given.items()]
    graph = helper.make_graph(
        [node], "g", inputs, [helper.make_tensor_value_info("Y", TYPES[str(q.dtype)], (*q.shape[:3], v.shape[3]))]
    )
    opset = helper.make_opsetid("", 23 if lengths is None else 24)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=11)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.swapaxes(session.run(None, {x: np.ascontiguousarray(y) for x, y in given.items()})[0], 1, 2)
