"""A response as its tokens, each in the colour of how likely it was, or of the weights that made it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.style import Style
from rich.text import Text

from infra.escaping import escape_control_characters
from schemas.records import Trajectory

SCALE = ((-0.1, 46), (-0.5, 148), (-1.0, 220), (-2.0, 208), (-4.0, 202), (float("-inf"), 196))
"""Least logprob of a step, and its colour of the terminal's 256: green is what was nearly certain."""
VERSIONS = (39, 208, 170, 46, 226, 51)
OTHERS = 245
"""Tokens that the policy did not make."""


class Tokens(NamedTuple):
    """A response by token: columns of one length. `texts` is None where no tokenizer was found."""

    ids: list[int]
    texts: list[str] | None
    logprobs: list[float]
    made_by_policy: list[bool]
    versions: list[str]


def tokens_of(trajectory: Trajectory, model: Path | None) -> Tokens:
    """The response of `trajectory`, spelt by the tokenizer in folder `model` if there is one."""
    from infra.models.token_texts import token_texts

    response = trajectory.response
    ids = response.token_ids.to_pylist()
    versions = [str(span.version) for span in trajectory.version_spans for _ in range(span.length)]
    return Tokens(
        ids,
        token_texts(model, ids) if model is not None and (model / "tokenizer.json").is_file() else None,
        response.logprobs.to_pylist(),
        response.loss_mask.to_pylist(),
        versions,
    )


def coloured(tokens: Tokens, by: str) -> Iterator[Text]:
    """The text, and what its colours mean; token ids where nobody can spell them. `by` logprob, version or none."""
    text = Text()
    known = sorted(set(tokens.versions))
    for at, token in enumerate(tokens.ids):
        number = OTHERS
        if tokens.made_by_policy[at]:
            number = _of_logprob(tokens.logprobs[at])
            if by == "version":
                number = VERSIONS[known.index(tokens.versions[at]) % len(VERSIONS)]
        spelt = f"{token} " if tokens.texts is None else escape_control_characters(tokens.texts[at])
        text.append(spelt, None if by == "none" else Style(color=f"color({number})"))
    yield Text()
    yield text
    if by != "none":
        yield Text()
        yield _legend(by, known)


def _of_logprob(logprob: float) -> int:
    return next(number for least, number in SCALE if logprob >= least)


def _legend(by: str, versions: list[str]) -> Text:
    steps = [(f"logprob ≥ {least:g}" if least > -9 else "less", number) for least, number in SCALE]
    if by == "version":
        steps = [(f"version {each}", VERSIONS[at % len(VERSIONS)]) for at, each in enumerate(versions)]
    legend = Text()
    for word, number in [*steps, ("not the policy's", OTHERS)]:
        legend.append("■ ", Style(color=f"color({number})")).append(f"{word}  ")
    return legend
