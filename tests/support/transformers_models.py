"""Small models of many architectures with random weights, and batches of padded inputs for them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import transformers as hf
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.mpt.modeling_mpt import MptAttention

from attnops.biases import ALiBi, alibi_slopes
from attnops.masks import Causal, KeyPadding
from attnops_adapters.buckets import pad_mask
from attnops_adapters.torch_call import Call, run
from attnops_adapters.transformers import Attend

B, T, S, VOCABULARY = 2, 23, 17, 61  # S: tokens of an encoder
PADDING, WINDOW, CHUNK, PREFIX, IMAGE = 5, 7, 6, 9, 4  # in tokens; the second row of a batch is padded
IMAGE_TOKEN = VOCABULARY - 1

Inputs = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model, a batch for it, and what its attention layers are to be called with.

    Attributes:
        model: the class.
        config: the configuration of a small one.
        inputs: makes a batch.
        layers: the attention layers, each called once a forward pass.
        masks: the layers' masks, each as the kinds that it is made of, without "&".
        faults: mistakes of an attention that this model must notice, in addition to a wrong scale.
        gradients: the tolerance of gradients, relative to the largest element of each.
        forward: for layers that ignore `AttentionInterface`: their class, and what makes their forward of attnops'
            attention.
    """

    model: type[hf.PreTrainedModel]
    config: hf.PreTrainedConfig
    inputs: Callable[[], Inputs]
    layers: int = 2
    masks: tuple[set[str], ...]
    faults: tuple[str, ...] = ()
    gradients: float = 2e-5
    forward: tuple[type, Callable[[Attend], Callable[..., Any]]] | None = None

    def build(self) -> hf.PreTrainedModel:
        """The model in eval mode, which drops nothing; the same weights every time."""
        torch.manual_seed(0)
        model = self.model(self.config).eval()
        for name, parameter in model.named_parameters():
            _randomise(name, parameter.data)
        return model

    def patched(self, attend: Attend) -> contextlib.AbstractContextManager[Any]:
        """Within it, layers that ignore `AttentionInterface` call ``attend`` all the same."""
        if self.forward is None:
            return contextlib.nullcontext()
        layer, forward = self.forward
        return mock.patch.object(layer, "forward", forward(attend))


def _randomise(name: str, values: torch.Tensor) -> None:
    """Weights with which scores differ from key to key; with the usual initial ones attention is an average."""
    if values.ndim == 1:  # scales near 1, and biases, sinks
        values.add_(0.3 * torch.randn_like(values))
    elif any(part in name for part in ("embed", "wte", "wpe", "shared")):
        values.normal_(std=0.3)
    else:
        values.normal_(std=1.3 * min(values.shape[-2:]) ** -0.5)


# Batches


def _tokens(length: int = T) -> torch.Tensor:
    return torch.randint(3, IMAGE_TOKEN, (B, length), generator=torch.Generator().manual_seed(1))


def _padded(length: int = T, left: bool = True) -> torch.Tensor:
    attention_mask = torch.ones(B, length, dtype=torch.long)
    attention_mask[1, slice(PADDING) if left else slice(-PADDING, None)] = 0
    return attention_mask


def left_padded() -> Inputs:
    attention_mask = _padded()
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": _tokens(), "attention_mask": attention_mask, "position_ids": position_ids}


def without_positions() -> Inputs:
    return {name: x for name, x in left_padded().items() if name != "position_ids"}


def packed() -> Inputs:
    """Two sequences in each row, told apart by their positions alone."""
    lengths = ((9, T - 9), (14, T - 14))
    position_ids = torch.tensor([[i for n in row for i in range(n)] for row in lengths])
    return {"input_ids": _tokens(), "position_ids": position_ids}


def text_to_text() -> Inputs:
    decoder = {"decoder_input_ids": _tokens(), "decoder_attention_mask": _padded(left=False)}
    return {"input_ids": _tokens(S), "attention_mask": _padded(S, left=False), **decoder}


def speech_to_text() -> Inputs:
    features = torch.randn(B, 10, 2 * S, generator=torch.Generator().manual_seed(2))
    decoder = {"decoder_input_ids": _tokens(), "decoder_attention_mask": _padded(left=False)}
    return {"input_features": features, **decoder}


def image_and_text() -> Inputs:
    """An image and a prompt that see each other, then an answer."""
    input_ids, token_type_ids = _tokens(), torch.ones(B, T, dtype=torch.long)
    for row, start in enumerate((0, PADDING)):
        input_ids[row, start : start + IMAGE] = IMAGE_TOKEN
        token_type_ids[row, : start + PREFIX] = 0
    pixels = torch.randn(B, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    return {
        "input_ids": input_ids,
        "attention_mask": _padded(),
        "token_type_ids": token_type_ids,
        "pixel_values": pixels,
    }


# Layers that compute their attention themselves, and add slope × key index to its scores. attnops' ALiBi is
# slope × distance, which differs by a constant in each row.


def mpt(attend: Attend) -> Callable[..., Any]:
    def forward(
        self: MptAttention, hidden_states: torch.Tensor, *, attention_mask: torch.Tensor, **ignored: Any
    ) -> tuple[torch.Tensor, None]:
        states = self.Wqkv(hidden_states).unflatten(-1, (3, self.n_heads, self.head_dim))
        out = _with_alibi(attend, states.unbind(2), ~attention_mask)
        return self.out_proj(out), None

    return forward


def bloom(attend: Attend) -> Callable[..., Any]:
    def forward(
        self: BloomAttention,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        *,
        attention_mask: torch.Tensor,
        **ignored: Any,
    ) -> tuple[torch.Tensor, None]:
        states = self.query_key_value(hidden_states).unflatten(-1, (self.num_heads, 3, self.head_dim))
        out = _with_alibi(attend, states.unbind(3), attention_mask == 0)
        return self.dense(out) + residual, None

    return forward


def _with_alibi(attend: Attend, states: tuple[torch.Tensor, ...], allowed: torch.Tensor) -> torch.Tensor:
    """[B, T, H · D] of query, key and value [B, T, H, D] and a causal mask [B, 1, T, T]: padding is in its last row."""
    query, key, value = (x.transpose(1, 2) for x in states)
    mask = Causal() & KeyPadding(allowed[:, 0, -1].numpy())

    heads, head_dim = query.shape[1], query.shape[3]
    call = Call(functools.partial(attend, bias=ALiBi(alibi_slopes(heads))), (("softmax_scale", head_dim**-0.5),))
    mask = pad_mask(mask, *query.shape[:3], key.shape[2])
    return run(call, (query, key, value, None, None), mask).transpose(1, 2).flatten(2)


# Architectures

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SMALL_IDS = {name: _SIZES[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
_ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 150000.0}

_CAUSAL = {"Causal", "KeyPadding"}
_LOCAL = {"Causal", "SlidingWindow", "KeyPadding"}
_PADDED = {"Full", "KeyPadding"}

ARCHITECTURES = {
    "llama": Architecture(
        model=hf.LlamaForCausalLM,
        config=hf.LlamaConfig(**_SIZES),
        inputs=left_padded,
        masks=(_CAUSAL, _CAUSAL),
        faults=("padding",),
    ),
    "llama-packed": Architecture(
        model=hf.LlamaForCausalLM,
        config=hf.LlamaConfig(**_SIZES),
        inputs=packed,
        masks=({"Segments", "Causal", "at"},) * 2,
        faults=("segments",),
    ),
    "qwen3": Architecture(
        model=hf.Qwen3ForCausalLM,
        config=hf.Qwen3Config(**_SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
        inputs=left_padded,
        masks=(_CAUSAL, _LOCAL),
        faults=("padding", "window"),
    ),
    "mistral": Architecture(
        model=hf.MistralForCausalLM,
        config=hf.MistralConfig(**_SIZES, sliding_window=WINDOW),
        inputs=left_padded,
        masks=(_LOCAL, _LOCAL),
        faults=("padding", "window"),
    ),
    "phi3": Architecture(
        model=hf.Phi3ForCausalLM,
        config=hf.Phi3Config(**_SIZES, sliding_window=WINDOW),
        inputs=left_padded,
        masks=(_LOCAL, _LOCAL),
        faults=("padding", "window"),
    ),
    "gemma2": Architecture(
        model=hf.Gemma2ForCausalLM,
        config=hf.Gemma2Config(**_SIZES, **_ALTERNATING, attn_logit_softcapping=2.0, query_pre_attn_scalar=5),
        inputs=left_padded,
        masks=(_LOCAL, _CAUSAL),
        faults=("padding", "window", "cap"),
    ),
    "gemma3": Architecture(
        model=hf.Gemma3ForCausalLM,
        config=hf.Gemma3TextConfig(**_SIZES, **_ALTERNATING, query_pre_attn_scalar=5),
        inputs=left_padded,
        masks=(_LOCAL, _CAUSAL),
        faults=("padding", "window"),
    ),
    "gpt_oss": Architecture(
        model=hf.GptOssForCausalLM,
        config=hf.GptOssConfig(
            **_SIZES, **_ALTERNATING, num_local_experts=4, num_experts_per_tok=2, rope_parameters=_YARN
        ),
        inputs=left_padded,
        masks=(_LOCAL, _CAUSAL),
        faults=("padding", "window", "sinks"),
    ),
    "deepseek_v3": Architecture(
        model=hf.DeepseekV3ForCausalLM,
        config=hf.DeepseekV3Config(
            **_SIZES | {"num_key_value_heads": 4, "head_dim": 4},
            q_lora_rank=10,
            kv_lora_rank=12,
            qk_nope_head_dim=6,
            qk_rope_head_dim=4,
            v_head_dim=7,
            first_k_dense_replace=1,
            moe_intermediate_size=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
        ),
        inputs=left_padded,
        masks=(_CAUSAL, _CAUSAL),
        faults=("padding",),
    ),
    "llama4": Architecture(
        model=hf.Llama4ForCausalLM,
        config=hf.Llama4TextConfig(
            **_SIZES,
            attention_chunk_size=CHUNK,
            no_rope_layers=[1, 0],
            intermediate_size_mlp=48,
            num_local_experts=4,
            num_experts_per_tok=1,
        ),
        inputs=left_padded,
        masks=({"Chunked", "at", "Causal", "KeyPadding"}, _CAUSAL),
        faults=("padding", "chunks"),
    ),
    "gpt2": Architecture(
        model=hf.GPT2LMHeadModel,
        config=hf.GPT2Config(**_SMALL_IDS, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        inputs=left_padded,
        masks=(_CAUSAL, _CAUSAL),
        faults=("padding",),
    ),
    "t5": Architecture(
        model=hf.T5ForConditionalGeneration,
        config=hf.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
        ),
        inputs=text_to_text,
        layers=6,
        masks=(_PADDED, _PADDED, _CAUSAL, _PADDED, _CAUSAL, _PADDED),
        faults=("padding", "bias"),
        gradients=5e-5,  # scores are not scaled down: eager attention in float32 is 1.2e-5 off that in float64
    ),
    "whisper": Architecture(
        model=hf.WhisperForConditionalGeneration,
        config=hf.WhisperConfig(
            **_SMALL_IDS,
            num_mel_bins=10,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_source_positions=S,
            max_target_positions=64,
            decoder_start_token_id=1,
        ),
        inputs=speech_to_text,
        layers=6,
        masks=({"Full"}, {"Full"}, _CAUSAL, {"Full"}, _CAUSAL, {"Full"}),
        faults=("causal",),
    ),
    "paligemma": Architecture(
        model=hf.PaliGemmaForConditionalGeneration,
        config=hf.PaliGemmaConfig(
            text_config={**_SIZES, "model_type": "gemma"},
            vision_config={
                "model_type": "siglip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "image_size": 8,
                "patch_size": 4,
                "projection_dim": 32,
                "vision_use_head": False,
            },
            image_token_id=IMAGE_TOKEN,
            projection_dim=32,
            hidden_size=32,
        ),
        inputs=image_and_text,
        layers=3,
        masks=({"Full"}, {"PrefixLM", "KeyPadding"}, {"PrefixLM", "KeyPadding"}),
        faults=("padding", "prefix"),
    ),
    "mpt": Architecture(
        model=hf.MptForCausalLM,
        config=hf.MptConfig(vocab_size=VOCABULARY, d_model=48, n_heads=6, n_layers=2, max_seq_len=64),
        inputs=without_positions,
        masks=(_CAUSAL, _CAUSAL),
        faults=("padding", "bias"),
        forward=(MptAttention, mpt),
    ),
    "bloom": Architecture(
        model=hf.BloomForCausalLM,
        config=hf.BloomConfig(**_SMALL_IDS, hidden_size=48, n_layer=2, n_head=6),
        inputs=without_positions,
        masks=(_CAUSAL, _CAUSAL),
        faults=("padding", "bias"),
        forward=(BloomAttention, bloom),
    ),
}
