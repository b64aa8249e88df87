"""The text of each token, from the tokenizer file of a model folder, without torch and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


def token_texts(folder: Path, token_ids: Sequence[int]) -> list[str]:
    """The text of each of `token_ids`, which concatenate to the whole text; "" for a token ending within a character.

    Bytes that are no UTF-8, as a model with byte tokens may generate, are shown as the decoder shows each token alone.
    Raises ValueError naming a tokenizer file that cannot be read.
    """
    tokenizer = _tokenizer(folder / "tokenizer.json")
    stream, texts = DecodeStream(skip_special_tokens=False), []
    for token in token_ids:
        try:
            texts.append(stream.step(tokenizer, token) or "")
        except Exception:  # noqa: BLE001 - it raises no other class, if a byte changes the text before it
            stream = DecodeStream(skip_special_tokens=False)
            texts.append(stream.step(tokenizer, token) or "")
    return texts


@lru_cache(maxsize=1)
def _tokenizer(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # it raises no other class
        raise ValueError(f"{file} cannot be read: {error}") from error
