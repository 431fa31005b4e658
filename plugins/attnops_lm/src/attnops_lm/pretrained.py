"""The methods of a model that load and save it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from flax import nnx

from attnops_lm import checkpoint

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    import jax

    from attnops_lm.config import Config


class Pretrained:
    """``from_pretrained``, ``save_pretrained`` and ``lazy_init``."""

    @classmethod
    def head_options(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The class's arguments, besides the `Config`, that are read from a Hugging Face ``config.json``."""
        return {}

    @classmethod
    def lazy_init(cls, config: Config, **options: Any) -> Self:
        """A model whose weights are shapes (`jax.ShapeDtypeStruct`), to be set from a checkpoint.

        Args:
            config: sizes and choices.
            **options: other arguments of the class, such as operation, metadata and dtype of `CausalLM`.
        """
        return nnx.eval_shape(lambda: cls(config, **options))  # type: ignore[call-arg]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **options: Any) -> Self:
        """Load a model from a directory in Hugging Face's format, with the options of `attnops_lm.checkpoint.load`."""
        return checkpoint.load(cls, pretrained_model_name_or_path, **options)  # type: ignore[arg-type, return-value]

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        push_to_hub: bool = False,
        token: str | bool | None = None,
        gather_fns: Mapping[str, Callable[[jax.Array], jax.Array]] | None = None,
        float_dtype: Any = None,
        step: int | None = None,
    ) -> None:
        """Write the model to a directory that `from_pretrained`, the server and transformers can read.

        Args:
            save_directory: the directory; it is created if it does not exist.
            push_to_hub: must be False: nothing is sent anywhere.
            token: must be None, for the same reason.
            gather_fns: by a weight's path, such as ``layers.0.mlp.up.kernel``, a function that gathers its shards. Not
                needed on one process; over several, `gather_model` does the same.
            float_dtype: the float dtype of the weights in the file, of at least 16 bits; None: as they are.
            step: if given, the directory is ``checkpoint-{step}`` in ``save_directory``.

        Raises:
            ValueError: an argument that must not be given, a path of ``gather_fns`` that the model does not have, a
                ``float_dtype`` of integers or of 8 bits, or a model with LoRA or quantised layers.
        """
        if push_to_hub or token is not None:
            raise ValueError("push_to_hub and token are not supported; save to a directory, and use huggingface_hub")
        directory = Path(save_directory) / (f"checkpoint-{step}" if step is not None else "")
        checkpoint.save(self, directory, float_dtype, gather_fns)  # type: ignore[arg-type]
