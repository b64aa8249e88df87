"""A response's tokens, each in the colour of its logprob or of the weight version that generated it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeGuard

from rich.style import Style
from rich.text import Text

from infra.escaping import escape_control_characters
from schemas.records import Trajectory

SCALE = ((-0.1, 46), (-0.5, 148), (-1.0, 220), (-2.0, 208), (-4.0, 202), (float("-inf"), 196))
"""Lower logprob bounds and their 256-colour codes; green is nearly certain."""
VERSION_COLOURS = (39, 208, 170, 46, 226, 51)
OTHER_COLOUR = 245
"""The colour of tokens that the policy did not generate."""


class Tokens(NamedTuple):
    """A response's tokens as columns of equal length. `texts` is None if no tokenizer was found."""

    ids: list[int]
    texts: list[str] | None
    logprobs: list[float]
    from_policy: list[bool]
    versions: list[str]


def tokens_of(trajectory: Trajectory, model: Path | None) -> Tokens:
    """Return the tokens of `trajectory`'s response, with texts if folder `model` has a tokenizer."""
    from infra.models.token_texts import token_texts

    response = trajectory.response
    ids, masks = response.token_ids.to_pylist(), response.loss_mask.to_pylist()
    turns = {at for at in range(1, len(ids)) if masks[at] != masks[at - 1]}
    versions = [str(span.version) for span in trajectory.version_spans for _ in range(span.length)]
    return Tokens(
        ids,
        token_texts(model, ids, turns) if has_tokenizer(model) else None,
        response.logprobs.to_pylist(),
        masks,
        versions,
    )


def has_tokenizer(model: Path | None) -> TypeGuard[Path]:
    """Whether folder `model` has a tokenizer file."""
    return model is not None and (model / "tokenizer.json").is_file()


def coloured(tokens: Tokens, by: str) -> Iterator[Text]:
    """Yield the coloured text and its legend; token ids if there are no texts. `by`: logprob, version or none."""
    yield Text()
    yield Text.assemble(*token_pieces(tokens, by))
    if by != "none":
        yield Text()
        yield legend(by, sorted(set(tokens.versions)))


def token_pieces(tokens: Tokens, by: str) -> list[tuple[str, Style]]:
    """Return the text of each token with its style; token ids if there are no texts. `by` as in `coloured`."""
    known = sorted(set(tokens.versions))
    pieces = []
    for at, token in enumerate(tokens.ids):
        colour = OTHER_COLOUR
        if tokens.from_policy[at]:
            colour = SCALE[level(tokens.logprobs[at])][1]
            if by == "version":
                colour = VERSION_COLOURS[known.index(tokens.versions[at]) % len(VERSION_COLOURS)]
        text = f"{token} " if tokens.texts is None else escape_control_characters(tokens.texts[at])
        pieces.append((text, Style() if by == "none" else Style(color=f"color({colour})")))
    return pieces


def level(logprob: float) -> int:
    """The index in SCALE; the last one for NaN too."""
    return next((at for at, (lowest, _) in enumerate(SCALE) if logprob >= lowest), len(SCALE) - 1)


def legend(by: str, versions: list[str]) -> Text:
    """Return the meaning of the colours."""
    entries = [(f"logprob ≥ {lowest:g}" if lowest > -9 else "lower", colour) for lowest, colour in SCALE]
    if by == "version":
        colours = (VERSION_COLOURS[at % len(VERSION_COLOURS)] for at in range(len(versions)))
        entries = [(f"version {version}", colour) for version, colour in zip(versions, colours, strict=True)]
    text = Text()
    for label, colour in [*entries, ("not from the policy", OTHER_COLOUR)]:
        text.append("■ ", Style(color=f"color({colour})")).append(f"{label}  ")
    return text
