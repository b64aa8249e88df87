"""What a model folder says of the model's sizes, read without loading any model code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_VOCABULARY = ("vocab_size",)


def context_length(folder: Path) -> int:
    """Tokens of prompt and response together that the model in `folder` has positions for.

    Raises ValueError naming the folder and what is wrong with it.
    """
    return _said(folder, _CONTEXT, "how long a context may be")


def vocabulary_size(folder: Path) -> int:
    """How many tokens the model in `folder` knows. Raises ValueError as `context_length`."""
    return _said(folder, _VOCABULARY, "how many tokens it knows")


def _said(folder: Path, names: Sequence[str], what: str) -> int:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is no model folder: it has no config.json") from error
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise ValueError(f"{file} does not say {what} (none of {', '.join(names)})")
