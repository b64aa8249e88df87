"""The text of each token, from the tokenizer file of a model folder, without torch and transformers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from infra.models.conversations import UNFINISHED


def token_texts(folder: Path, token_ids: Sequence[int], turns: Collection[int] = ()) -> list[str]:
    """The text of each of `token_ids`, which concatenate to the whole text; "" for a token ending within a character.

    Bytes that are no UTF-8, as a model with byte tokens may generate, are shown as the decoder shows each token alone.
    At each of `turns`, the positions at which another speaks, an unfinished character ends; then the next token is
    decoded as the first of a text, which some tokenizers do without its space. Raises ValueError naming a tokenizer
    file that cannot be read.
    """
    tokenizer = _tokenizer(folder / "tokenizer.json")
    stream: DecodeStream = DecodeStream(skip_special_tokens=False)
    texts: list[str] = []
    for at, token in enumerate(token_ids):
        if at in turns and texts and not texts[-1] and UNFINISHED in tokenizer.decode([token_ids[at - 1]]):
            stream, texts[-1] = DecodeStream(skip_special_tokens=False), UNFINISHED
        try:
            texts.append(stream.step(tokenizer, token) or "")
        except Exception:  # noqa: BLE001 - it raises no other class, if a byte changes the text before it
            stream = DecodeStream(skip_special_tokens=False)
            texts.append(stream.step(tokenizer, token) or "")
    return texts


def texts_in_context(folder: Path, parts: Sequence[Sequence[int]]) -> list[str] | None:
    """The text of each of `parts`, which are tokens, where it follows those before it; without special tokens.

    Many tokenizers drop the space of a text's first token if it is decoded alone. None if a character lies in two
    parts. Raises ValueError naming a tokenizer file that cannot be read.
    """
    tokenizer = _tokenizer(folder / "tokenizer.json")
    token_ids: list[int] = []
    before, texts = "", []
    for part in parts:
        token_ids.extend(part)
        whole = tokenizer.decode(token_ids, skip_special_tokens=True)
        if not whole.startswith(before):
            return None
        texts.append(whole[len(before) :])
        before = whole
    return texts


@lru_cache(maxsize=1)
def _tokenizer(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # it raises no other class
        raise ValueError(f"{file} cannot be read: {error}") from error
