"""The methods of a model that load and save it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from flax import nnx

from . import checkpoint

if TYPE_CHECKING:
    import os

    from .config import Config


class Pretrained:
    """``from_pretrained``, ``save_pretrained`` and ``lazy_init`` of a `CausalLM`."""

    @classmethod
    def lazy_init(cls, config: Config, **options: Any) -> Self:
        """A model whose weights are shapes (`jax.ShapeDtypeStruct`), to be set from a checkpoint.

        Args:
            config: sizes and choices.
            **options: see `CausalLM`.
        """
        return nnx.eval_shape(lambda: cls(config, **options))  # type: ignore[call-arg]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **options: Any) -> Self:
        """A model from a directory in Hugging Face's format, see `examples.causal_lm.checkpoint.load`."""
        return checkpoint.load(cls, pretrained_model_name_or_path, **options)  # type: ignore[arg-type, return-value]

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, float_dtype: Any = None
    ) -> None:
        """Write a directory that `from_pretrained` and transformers read.

        Args:
            save_directory: made if it does not exist.
            push_to_hub: must be False: nothing is sent anywhere.
            float_dtype: of the weights in the file; None: as they are.
        """
        if push_to_hub:
            raise ValueError("push_to_hub=True is not supported; save to a directory, and use huggingface_hub")
        checkpoint.save(self, save_directory, float_dtype)  # type: ignore[arg-type]
