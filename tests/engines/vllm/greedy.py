"""Greedy tokens of vLLM, with one attention backend, of a small model with random weights; one line of JSON.

    python greedy.py FOLDER BACKEND PROMPTS COUNT

Five things of a CPU are not what the engine expects: devices have no coordinates, which an explicit order of devices
avoids; the engine knows no memory limit of theirs, which is given here; it frees weights in float32 after JAX has taken
them through NumPy, which PyTorch refuses, so that they are kept; it gives XLA options for TPUs, which are left out; and
it writes the next step into arrays of NumPy that JAX shares on a CPU, so that each step must end first.

The engine's own kernel does not run here: JAX's interpreter of such kernels lacks the bitcast of a reference.
"""

import contextlib
import json
import sys
from unittest import mock


def main(folder: str, backend: str, prompts: str, count: str) -> None:
    import jax
    import torch
    import tpu_inference.utils
    from tpu_inference.models.common import compiler_options

    jax.config.update("jax_cpu_enable_async_dispatch", False)
    given = {"get_step_fn_compiler_options": dict, "get_sampling_compiler_options": dict}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(tpu_inference.utils, "hbm_usage_bytes", return_value=[(0, 1 << 30)]))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_"))
        stack.enter_context(mock.patch.multiple(compiler_options, **given))
        from vllm import LLM, SamplingParams  # which imports these functions

        engine = LLM(
            model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=128, block_size=16,
            max_num_seqs=8, max_num_batched_tokens=64, num_gpu_blocks_override=64, enable_prefix_caching=False,
            additional_config={"sharding": {"sharding_strategy": {"device_indexes": [0]}}}, attention_backend=backend,
        )  # fmt: skip
        sampling = SamplingParams(temperature=0, max_tokens=int(count), detokenize=False, ignore_eos=True)
        answers = engine.generate([{"prompt_token_ids": x} for x in json.loads(prompts)], sampling)
    print(json.dumps([list(x.outputs[0].token_ids) for x in answers]))


if __name__ == "__main__":
    main(*sys.argv[1:])
