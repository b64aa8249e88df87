"""The small files of a model folder: config, tokenizer and chat template. A folder of these alone has no weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from infra.files import new_folder

NAMES = frozenset(
    {
        *("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm", "target.spm"),
        *("vocab.json", "vocab.txt", "merges.txt"),
    }
)
"""The names of these files; those of code and weights are not among them."""
_MARKER = "weights-from-relays"
"""An empty file in a folder that has no weights on purpose: they come from the run's relays."""


def read_config_files(folder: Path) -> dict[str, bytes]:
    """The small files of the model in `folder`, by name. Raises OSError."""
    return {name: (folder / name).read_bytes() for name in sorted(NAMES) if (folder / name).is_file()}


def write_without_weights(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the new model folder `folder` atomically, readable by its owner only.

    A folder that has these files already is kept. Raises ValueError for other names or another folder there, OSError.
    """
    if unknown := sorted(files.keys() - NAMES):
        raise ValueError(f"{unknown[0]!r} is not a file of a model's config or tokenizer")
    if not folder.exists():
        try:
            with new_folder(folder) as made:
                made.chmod(0o700)
                for name, data in {**files, _MARKER: b""}.items():
                    (made / name).touch(0o600)
                    (made / name).write_bytes(data)
        except OSError:
            if not folder.exists():  # else another process was first
                raise
    if not is_without_weights(folder) or read_config_files(folder) != dict(files):
        raise ValueError(f"{folder} has other files than those of the run: remove it")


def is_without_weights(folder: Path) -> bool:
    """Whether `folder` was written by `write_without_weights`."""
    return (folder / _MARKER).is_file()
