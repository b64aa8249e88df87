"""What a model folder says of its context, read without loading any model code."""

from __future__ import annotations

import json
from pathlib import Path

_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def context_length(folder: Path) -> int:
    """Tokens of prompt and response together that the model in `folder` has positions for.

    Raises ValueError naming the folder and what is wrong with it.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is no model folder: it has no config.json") from error
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    for name in _NAMES:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise ValueError(f"{file} does not say how long a context may be (none of {', '.join(_NAMES)})")
