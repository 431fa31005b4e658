"""Where a model was loaded from, so that its tokenizer is saved with it."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

# The tokenizer's files in a folder: three that `Tokenizer` reads, and others that other libraries read.
TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
FILES = (
    TOKENIZER, CONFIG, TEMPLATE, "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "merges.txt",
)  # fmt: skip


class Origin:
    """Where a model was loaded from: a directory in Hugging Face's format, a GGUF file, or nothing.

    It is an attribute of a model, and so part of the key of its programs. All origins are equal, since programs do not
    depend on them.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = None if path is None else path.absolute()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin)

    def __repr__(self) -> str:
        return f"Origin({str(self.path)!r})"

    def __hash__(self) -> int:
        return hash(Origin)

    def write_tokenizer(self, directory: Path) -> None:
        """Write the model's tokenizer, if there is one, into an existing directory; warn if the origin is gone."""
        if self.path is None:
            return
        if not self.path.exists():
            warnings.warn(
                f"{directory} is written without a tokenizer: {self.path}, where the model was loaded from, is gone; "
                f"copy {TOKENIZER} and {CONFIG} of the model there",
                stacklevel=4,
            )
        elif self.path.is_file():
            from attnops_lm.gguf_file import tokenizer_of  # which needs gguf

            tokenizer_of(self.path).save_pretrained(directory)
        elif self.path.resolve() != directory.resolve():
            for name in FILES:
                if (self.path / name).exists():
                    shutil.copyfile(self.path / name, directory / name)
