# /// script
# dependencies = ["onnxruntime==1.32.0", "onnx==1.23.2"]
# ///
# shows: onnxruntime_cpu: lengths, NaN in the padding
# The documentation: "nonpad_kv_seqlen … indicates the number of valid (ie, non-padding) tokens in each sample"; nothing
# of what the cache holds after them. Expected: as if it ended there; got: NaN, as 0 · NaN is.
import numpy as np
import onnxruntime
from onnx import helper

rng = np.random.default_rng(0)
q, k, v = (rng.normal(size=(1, 1, 3, 4)).astype(np.float32) for _ in range(3))
s = np.float64(q[0, 0]) @ np.float64(k[0, 0, :2]).T / 2
expected = np.exp(s) / np.exp(s).sum(-1, keepdims=True) @ np.float64(v[0, 0, :2])
k[..., 2, :], v[..., 2, :] = np.nan, np.nan
names = ["Q", "K", "V", "", "", "", "n"]
infos = [helper.make_tensor_value_info(x, 1, (1, 1, 3, 4)) for x in "QKV"] + [
    helper.make_tensor_value_info("n", 7, (1,))
]
out = helper.make_tensor_value_info("Y", 1, (1, 1, 3, 4))
graph = helper.make_graph([helper.make_node("Attention", names, ["Y"])], "g", infos, [out])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
got = session.run(None, {"Q": q, "K": k, "V": v, "n": np.array([2])})[0][0, 0]
print("got", got)
print("expected", expected)
