"""`Generation`: the methods of a model that generate tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnops_caches import Cache
from attnops_lm.generation.config import GenerationConfig
from attnops_lm.generation.loop import Generated, generate, read_call
from attnops_lm.generation.prompt import read_prompt
from attnops_lm.generation.state import LogitsProcessor
from attnops_lm.generation.text import Streamer, TextDecoder


class Generation:
    """Methods that generate. The model has `config`, `init_cache` and `init_ragged_pages`."""

    config: Any

    @classmethod
    def can_generate(cls) -> bool:
        """Whether the model has `generate`."""
        return True

    def generate(
        self,
        input_ids: Any,
        generation_config: GenerationConfig | None = None,
        prng_key: jax.Array | None = None,
        trace: bool = True,
        logits_processor: LogitsProcessor | None = None,
        *,
        attention_mask: Any = None,
        past_key_values: tuple[Cache, ...] | None = None,
        streamer: Streamer | None = None,
        tokenizer: TextDecoder | None = None,
        chunk: int | None = None,
        **kwargs: Any,
    ) -> Generated:
        """Generate the tokens that follow prompts.

        Two programs are compiled, for a chunk of the prompt and for a step; they serve all later calls whose batch,
        rounded length, chunk, drafts and processor are the same. How tokens are drawn, limits and end tokens are
        arguments of the programs.

        Args:
            input_ids: integers [B, P]; or lists of tokens of different lengths.
            generation_config: how tokens are chosen, and when rows end; None for the defaults.
            prng_key: a key, or keys [B]; used only with ``do_sample``. The tokens drawn for a row depend on its key
                and its tokens, not on the batch, the chunks or the drafts.
            trace: whether steps are compiled. False runs them operation by operation, for debugging.
            logits_processor: ``(tokens int32 [B, S], scores float32 [B, V], lengths int32 [B]) -> scores``, called when
                a step is traced. Row b has ``lengths[b]`` tokens, −1 for padding. In a beam search, scores are
                log-probabilities. Programs are compiled for each function.
            attention_mask: [B, P], 0 for padding left or right of a row's tokens; None: no padding.
            past_key_values: caches with earlier tokens, one per layer, which are donated: use those that are returned.
                ``input_ids`` are then only the new tokens.
            streamer: is given the prompt, then the tokens of each step; such as a `TextStreamer`, which prints them.
            tokenizer: needed for ``stop_strings`` and `Generated.texts`.
            chunk: tokens of the prompt that are computed at a time, in place of ``prefill_chunk_size``.
            **kwargs: fields of `GenerationConfig` that are changed.

        Memory: caches of S tokens per row, where S is P + new tokens rounded up to a power of two, or above 1,024 to a
        multiple of 1,024. A beam search needs ``num_beams`` times that, and twice as much while it reorders rows (over
        pages, only for the pages in which beams differ).

        Raises:
            ValueError: arguments that don't fit together, more tokens than the model's context, or a model without a
                head.
        """
        config = (GenerationConfig() if generation_config is None else generation_config).updated(kwargs)
        call = read_call(
            self, input_ids, config, prng_key, trace, logits_processor, attention_mask, past_key_values, streamer,
            tokenizer, chunk,
        )  # fmt: skip
        return generate(call)

    def prepare_inputs_for_generation(
        self,
        input_ids: Any,
        max_length: int,
        pad_token_id: int | None = None,
        starts: Any = None,
        shardings: dict[str, Any] | None = None,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        mask_info: Any = None,
    ) -> dict[str, Any]:
        """The keyword arguments of the model's first call, to write your own loop::

            inputs = model.prepare_inputs_for_generation(input_ids, max_length, attention_mask=mask)
            out = model(input_ids, **inputs)
            token = out.logits[:, -1].argmax(-1)
            inputs = model.update_inputs_for_generation(out, inputs)
            out = model(token[:, None], **inputs)

        Args:
            input_ids: integers [B, P].
            max_length: S, the tokens of a row, its padding included.
            pad_token_id: not used, since lengths tell what is padding.
            starts: tokens of left padding, integers [B]; None: from ``attention_mask``.
            shardings: ``{"mesh": Mesh, "rules": AxisRules}``, by which the caches are sharded; None: on the mesh of the
                model's metadata, else on one device.
            attention_mask: [B, P], 0 for padding left or right of a row's tokens; None: no padding.
            token_type_ids: must be None: the models have no types of tokens.
            mask_info: must be None: give ``attention_mask``.

        Raises:
            ValueError: the prompt is longer than ``max_length``, or an argument is not supported.
        """
        for name, value in (("token_type_ids", token_type_ids), ("mask_info", mask_info)):
            if value is not None:
                raise ValueError(f"{name} is given, but must be None: give attention_mask")
        if starts is not None and attention_mask is not None:
            raise ValueError("starts and attention_mask are both given: the mask says where padding is; leave one out")
        prompt = read_prompt(input_ids, attention_mask, self.config.vocab_size)
        if prompt.tokens.shape[1] > max_length:
            raise ValueError(f"input_ids has {prompt.tokens.shape[1]} tokens, but max_length={max_length} is less")
        padding = prompt.starts if starts is None else np.broadcast_to(np.asarray(starts), prompt.starts.shape)
        caches = self.init_cache(len(prompt.lengths), max_length, padding, shardings, pad_token_id)  # type: ignore[attr-defined]
        lengths = jnp.asarray(prompt.lengths)
        return {"past_key_values": caches, "query_lengths": lengths, "logits_at": lengths[:, None] - 1}

    def update_inputs_for_generation(self, model_outputs: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments of the next call, of one token per row, after `prepare_inputs_for_generation`."""
        rest = {name: x for name, x in model_kwargs.items() if name not in ("query_lengths", "logits_at")}
        return rest | {"past_key_values": model_outputs.past_key_values}
