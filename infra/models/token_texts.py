"""What each token of a text reads as, by the tokenizer file of a model folder; no torch and no transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


def token_texts(folder: Path, token_ids: Sequence[int]) -> list[str]:
    """A text for each of `token_ids`, which together make up theirs; "" for a token that ends in the middle of a sign.

    Raises ValueError naming the folder without a tokenizer that can be read.
    """
    file = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # it raises no other class
        raise ValueError(f"{file} cannot be read: {error}") from error
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in token_ids]
