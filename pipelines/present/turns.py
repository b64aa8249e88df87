"""The turns of an episode, from its tokens: what the model generated, and what its environment or agent put between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

from pipelines.present.token_colours import has_tokenizer
from schemas.records import AGENT, Trajectory

S = TypeVar("S")


class Turn(NamedTuple):
    """The tokens `start` to before `stop` of a response, from `speaker`: model, agent or environment."""

    speaker: str
    start: int
    stop: int


def turns_of(trajectory: Trajectory) -> list[Turn]:
    """The turns of an episode in order; none for a response without an environment."""
    if trajectory.episode is None:
        return []
    other = AGENT if trajectory.prompt.environment == AGENT else "environment"
    found, at = [], 0
    for generated, tokens in groupby(trajectory.response.loss_mask.to_pylist()):
        stop = at + len(list(tokens))
        found.append(Turn("model" if generated else other, at, stop))
        at = stop
    return found


def with_speakers(
    trajectory: Trajectory, pieces: Sequence[tuple[str, S]], request: str | None, style: S
) -> list[tuple[str, S]]:
    """`pieces`, one for each token of an episode's response, with a line in `style` before each turn.

    An agent's first `request`, if it is known, comes first, and the answer that it reported last.
    """
    lines: list[tuple[str, S]] = []
    agent = trajectory.prompt.environment == AGENT
    if agent and request is not None:
        lines += [("[agent]\n", style), (f"{request.strip()}\n", style)]
    for speaker, start, stop in turns_of(trajectory):
        lines += [(f"[{speaker}]\n", style), *pieces[start:stop], ("\n", style)]
    if agent and trajectory.text:
        lines += [("[answer]\n", style), (f"{trajectory.text}\n", style)]
    return lines


def turn_texts(trajectory: Trajectory, texts: Sequence[str], request: str | None) -> Iterator[dict[str, str]]:
    """Each turn as JSON: who spoke, and the text; `texts` are those of the response's tokens."""
    if request is not None and trajectory.prompt.environment == AGENT:
        yield {"from": AGENT, "text": request}
    for speaker, start, stop in turns_of(trajectory):
        yield {"from": speaker, "text": "".join(texts[start:stop])}


def request_text(trajectory: Trajectory, model: Path | None) -> str | None:
    """The text before the first turn of an agent's episode; None without a tokenizer, and for other trajectories."""
    if not has_tokenizer(model) or trajectory.prompt.environment != AGENT:
        return None
    from infra.models.token_texts import token_texts

    return "".join(token_texts(model, trajectory.prompt.token_ids.to_pylist()))
