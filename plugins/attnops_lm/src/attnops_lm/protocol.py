"""Methods that all models have: parameters, dtypes, shardings, LoRA, quantisation, losses, PyTorch.

Each method that changes something returns a new model, which shares the arrays that are not changed; the original model
stays as it is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attnops_lm import dtypes, lora, quantize, sharding, torch_model
from attnops_lm.config import Config
from attnops_lm.loss import LossConfig, LossMetrics, config_of, cross_entropy, next_tokens
from attnops_lm.params import components, merged

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from attnops_lm.quantize import QuantizationConfig
    from attnops_lm.sharding import PartitionRules

Model = Any  # a Decoder
Inputs = Mapping[str, Any]


class Parameters:
    """A model's parameters, as flax.nnx splits them."""

    @property
    def graphdef(self: Model) -> nnx.GraphDef[Any]:
        """The model without its arrays; hashable, so that it can be a static argument of `jax.jit`."""
        return nnx.split(self)[0]

    @property
    def graphstate(self: Model) -> nnx.State[Any, Any]:
        """The parameters, LoRA's included."""
        return nnx.state(self, nnx.Param)

    @property
    def graphother(self: Model) -> nnx.State[Any, Any]:
        """The variables that are not parameters: quantised weights."""
        _, _, others = nnx.split(self, nnx.Param, ...)
        return others

    def split_params(self: Model) -> nnx.State[Any, Any]:
        """The parameters, the same as ``graphstate``."""
        return self.graphstate

    def merge_params(self: Model, tree: nnx.State[Any, Any] | Inputs) -> Self:
        """A copy with these parameters; parameters that ``tree`` does not have are kept.

        Raises:
            ValueError: the model has no parameter at a path, or one of another shape.
        """
        return merged(self, tree)

    def split_params_dict(self: Model, params_dict: Inputs | None = None) -> dict[str, dict[str, Any]]:
        """Parameters in two parts, ``{"params": …, "lora_params": …}``, nested dicts of arrays.

        Args:
            params_dict: nested dicts, or arrays by path such as ``layers.0.attention.q.kernel``; None: the model's.
        """
        return components(nnx.to_pure_dict(self.graphstate) if params_dict is None else params_dict)

    def merge_params_dict(self: Model, params_dict: Inputs) -> Self:
        """A copy with these parameters; parameters that ``params_dict`` does not have are kept.

        Args:
            params_dict: nested dicts, such as a part of `split_params_dict`, or arrays by path.

        Raises:
            ValueError: the model has no parameter at a path, or one of another shape.
        """
        return merged(self, params_dict)

    def to_dtype(self: Model, dtype: Any) -> Self:
        """A copy that stores its parameters and computes in another dtype. See `attnops_lm.dtypes.to_dtype`."""
        return dtypes.to_dtype(self, dtype)

    def half(self: Model, change_runtime_dtype: bool = True) -> Self:
        """A copy with parameters in float16; it also computes in float16 unless ``change_runtime_dtype`` is False."""
        return dtypes.to_dtype(self, jnp.float16, change_runtime_dtype)

    def float(self: Model, change_runtime_dtype: bool = True) -> Self:
        """A copy with parameters in float32; it also computes in float32 unless ``change_runtime_dtype`` is False."""
        return dtypes.to_dtype(self, jnp.float32, change_runtime_dtype)

    def shard_model(self: Model, partition_rules: PartitionRules | None = None, mesh: Mesh | None = None) -> Self:
        """A copy with parameters sharded over a mesh. See `attnops_lm.sharding.shard`."""
        return sharding.shard(self, partition_rules, mesh)

    def gather_model(self: Model, partition_rules: PartitionRules | None = None, mesh: Mesh | None = None) -> Self:
        """A copy with all parameters on every device. See `attnops_lm.sharding.gather`."""
        return sharding.gather(self, partition_rules, mesh)

    @property
    def params_sharding(self: Model) -> dict[str, Any]:
        """The sharding of each parameter, in nested dicts."""
        return sharding.shardings(self)


class Adaptation:
    """LoRA and quantisation."""

    def apply_lora_to_layers(
        self: Model,
        lora_rank: int,
        lora_pattern: str | None = None,
        verbose: bool = False,
        rngs: nnx.Rngs | None = None,
    ) -> Self:
        """A copy with low-rank matrices added to linear layers. See `attnops_lm.lora.apply`."""
        return lora.apply(self, lora_rank, lora_pattern, verbose, rngs)

    def split_lora_params(self: Model) -> dict[str, Any]:
        """The low-rank matrices alone, in nested dicts, for example to save them."""
        return lora.split(self)

    def merge_lora_params(self: Model, pytree: Inputs) -> Self:
        """A copy of a model with LoRA layers, with these low-rank matrices."""
        return lora.merge(self, pytree)

    def unwrap_lora_to_layers(self: Model, verbose: bool = False) -> Self:
        """A copy whose kernels have the low-rank products added. See `attnops_lm.lora.unwrap`."""
        return lora.unwrap(self, verbose)

    def quantize(
        self: Model,
        quantization_config: QuantizationConfig | None = None,
        quantize_tensors: bool = True,
        verbose: bool | None = None,
    ) -> Self:
        """A copy with quantised linear layers, int8 by default. See `attnops_lm.quantize.quantize`."""
        return quantize.quantize(self, quantization_config, quantize_tensors, verbose)


class Calls:
    """Arguments of a call."""

    def prepare_inputs_for_call(self: Model, **kwargs: Any) -> dict[str, Any]:
        """The arguments of a call: None left out, lists and NumPy arrays converted.

        Raises:
            ValueError: the model has no such argument.
        """
        names = {
            name
            for function in (self.__call__, self.hidden)
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
        if unknown := sorted(set(kwargs) - names):
            raise ValueError(f"{type(self).__name__} has no argument {unknown[0]!r}; use some of {sorted(names)}")

        def converted(value: Any) -> Any:
            return jnp.asarray(value) if isinstance(value, (list, np.ndarray)) else value

        return {name: converted(value) for name, value in kwargs.items() if value is not None}

    def get_static_arguments(self) -> tuple[str, ...]:
        """The names of a call's arguments that must be static in `jax.jit`: none, since all are arrays or pytrees."""
        return ()


class Protocol(Parameters, Adaptation, Calls):
    """What every model has, with a head or without."""

    config_class: ClassVar[type[Config]] = Config
    base_model_prefix: ClassVar[str] = "model"  # prefix of the names of weights in a checkpoint, except the head's

    @property
    def transform_fn(self: Model) -> Callable[[Inputs], dict[str, Any]]:
        """A function that converts a transformers model's ``state_dict()`` to the argument of `merge_params_dict`."""
        return functools.partial(torch_model.from_torch, self)

    @property
    def pure_transform_fn(self: Model) -> Callable[[Inputs], dict[str, Any]]:
        """`transform_fn` that keeps only the shapes of the model's weights, not the weights."""
        graphdef, state = nnx.split(self)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        return functools.partial(torch_model.from_torch, nnx.merge(graphdef, shapes))

    def to_torch(self: Model) -> Any:
        """A transformers model with these weights. See `attnops_lm.torch_model.to_torch`."""
        return torch_model.to_torch(self, self.get_torch_loader())


class CausalLMProtocol(Protocol):
    """What a causal language model has."""

    @classmethod
    def get_torch_loader(cls) -> Any:
        """``transformers.AutoModelForCausalLM``."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM

    def compute_loss(
        self: Model,
        input_ids: jax.Array | None = None,
        labels: jax.Array | None = None,
        inputs_embeds: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        mask_info: Any = None,
        position_ids: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        past_key_values: Any = None,
        cache_metadata: Any = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        loss_config: LossConfig | None = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Any, LossMetrics]:
        """The cross entropy of the next tokens.

        Args:
            input_ids: integers [B, T].
            labels: integers [B, T], the tokens themselves (not shifted), −100 for tokens that are not to be predicted;
                None: ``input_ids``.
            inputs_embeds: [B, T, M], in place of input_ids.
            attention_mask: [B, T], 0 for padding: it neither predicts nor is predicted.
            mask_info: an `attnops.masks.Mask` that hides more keys.
            position_ids: integers [B, T]; None: counted from each sequence's first token.
            segment_ids: integers [B, T], the document of each token; the last token of a document predicts nothing.
            past_key_values: one cache per layer, to which the T tokens are appended; the loss is over the T tokens.
            cache_metadata: must be None: caches know their sizes.
            output_attentions: must not be True: attention weights are not computed.
            output_hidden_states: must not be True: the output has the hidden states of the last layer only.
            loss_config: how the loss is computed: ignored labels, smoothing, z-loss, reduction; None for the defaults.
            loss_kwargs: fields of ``loss_config`` to be replaced.

        Returns:
            A `CausalLMOutput` and the metrics.

        Raises:
            ValueError: an argument that must not be given, ``inputs_embeds`` without labels, labels that are not
                integers [B, T], or a model without a head.
        """
        self.config.require_head()
        refuse(cache_metadata, output_attentions, output_hidden_states)
        labels = input_ids if labels is None else labels
        if labels is None:
            raise ValueError("labels=None uses input_ids as labels, but input_ids=None; give one of them")
        config = config_of(loss_config, loss_kwargs)
        inputs = self.prepare_inputs_for_call(
            input_ids=input_ids, inputs_embeds=inputs_embeds, attention_mask=attention_mask, mask=mask_info,
            position_ids=position_ids, segment_ids=segment_ids, past_key_values=past_key_values,
        )  # fmt: skip
        output = self(**inputs)
        targets = next_tokens(jnp.asarray(labels), inputs.get("attention_mask"), inputs.get("segment_ids"), config)
        return output, cross_entropy(output.logits, targets, config)


class ClassifierProtocol(Protocol):
    """What a classifier has."""

    @classmethod
    def can_generate(cls) -> bool:
        """False: there is no head over the vocabulary."""
        return False

    @classmethod
    def get_torch_loader(cls) -> Any:
        """``transformers.AutoModelForSequenceClassification``."""
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification

    def compute_loss(
        self: Model,
        input_ids: jax.Array | None = None,
        labels: jax.Array | None = None,
        inputs_embeds: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        mask_info: Any = None,
        position_ids: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        loss_config: LossConfig | None = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Any, LossMetrics]:
        """The cross entropy of the classes.

        Args:
            input_ids: integers [B, T].
            labels: integers [B], the classes; −100 for rows that are ignored.
            inputs_embeds: [B, T, M], in place of input_ids.
            attention_mask: [B, T], 0 for padding.
            mask_info: an `attnops.masks.Mask` that hides more keys.
            position_ids: integers [B, T]; None: counted from each sequence's first token.
            segment_ids: integers [B, T], the documents packed into a row; the class is read at each row's last token.
            output_attentions: must not be True: attention weights are not computed.
            output_hidden_states: must not be True: the output has the hidden states of the last layer only.
            loss_config: how the loss is computed: ignored labels, smoothing, z-loss, reduction; None for the defaults.
            loss_kwargs: fields of ``loss_config`` to be replaced.

        Returns:
            A `SequenceClassifierOutput` and the metrics.

        Raises:
            ValueError: an argument that must not be given, or labels that are not integers [B].
        """
        refuse(None, output_attentions, output_hidden_states)
        config = config_of(loss_config, loss_kwargs)
        inputs = self.prepare_inputs_for_call(
            input_ids=input_ids, inputs_embeds=inputs_embeds, attention_mask=attention_mask, mask=mask_info,
            position_ids=position_ids, segment_ids=segment_ids,
        )  # fmt: skip
        output = self(**inputs)
        if labels is None:
            raise ValueError(f"labels=None must be integers {output.logits.shape[:1]}, a class per row")
        return output, cross_entropy(output.logits, jnp.asarray(labels), config)


def refuse(cache_metadata: Any, output_attentions: bool | None, output_hidden_states: bool | None) -> None:
    """Raise for arguments of the protocol that these models can't honour."""
    if cache_metadata is not None:
        raise ValueError("cache_metadata must be None: caches know their sizes; give past_key_values")
    if output_attentions:
        raise ValueError("output_attentions=True is not supported: attention weights are not computed")
    if output_hidden_states:
        raise ValueError("output_hidden_states=True is not supported; the output has last_hidden_state")
