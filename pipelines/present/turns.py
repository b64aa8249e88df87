"""The turns of an episode: who put which tokens, the model or its environment or agent; an agent's turns as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from infra.counted import counted
from infra.escaping import escape_to_one_line
from pipelines.inspect.log.turns import EpisodeTurns, TurnNode
from pipelines.present.token_colours import has_tokenizer
from schemas.records import AGENT, Trajectory

S = TypeVar("S")


class SpeakerTurn(NamedTuple):
    """The tokens `start` to before `stop` of a response, from `speaker`: model, agent or environment.

    `reward` is that of an environment for a turn of the model.
    """

    speaker: str
    start: int
    stop: int
    reward: float | None = None

    @property
    def label(self) -> str:
        """The speaker, and the reward if there is one."""
        return self.speaker if self.reward is None else f"{self.speaker}, reward {self.reward:g}"


def turns_of(trajectory: Trajectory) -> list[SpeakerTurn]:
    """The turns of an episode in order; none for a response without an environment."""
    if trajectory.episode is None:
        return []
    other = AGENT if trajectory.prompt.environment == AGENT else "environment"
    found, at = [], 0
    for generated, tokens in groupby(trajectory.response.loss_mask.to_pylist()):
        stop = at + len(list(tokens))
        found.append(SpeakerTurn("model" if generated else other, at, stop))
        at = stop
    rewards = trajectory.episode.rewards
    if other == AGENT or len(rewards) != sum(turn.speaker == "model" for turn in found):
        return found  # an agent has one reward; turns without an observation between them are one here
    left = iter(rewards)
    return [turn._replace(reward=next(left)) if turn.speaker == "model" else turn for turn in found]


def ending_text(trajectory: Trajectory) -> str:
    """How a response ended; an empty text if the model ended it."""
    if trajectory.episode is None:
        return "" if trajectory.finish_reason == "stop" else f"ended by {trajectory.finish_reason}"
    other = "agent" if trajectory.prompt.environment == AGENT else "environment"
    ends = {
        "done": f"ended by the {other}",
        "turns": "ended by the limit of turns",
        "length": "ended by the limit of tokens",
    }
    return ends.get(trajectory.episode.ending, f"the {other} failed")


def counted_turns(trajectory: Trajectory) -> str:
    """The number of the model's turns, as `1 turn` or `2 turns`."""
    return counted(sum(turn.speaker == "model" for turn in turns_of(trajectory)), "turn")


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
    for turn in turns_of(trajectory):
        own = pieces[turn.start : turn.stop]
        ended = bool(own) and own[-1][0].endswith("\n")
        lines += [(f"[{turn.label}]\n", style), *own, *([] if ended else [("\n", style)])]
    if agent and trajectory.text:
        lines += [("[answer]\n", style), (f"{trajectory.text}\n", style)]
    return lines


def turn_texts(trajectory: Trajectory, texts: Sequence[str], request: str | None) -> Iterator[dict[str, Any]]:
    """Each turn as JSON: who spoke, the text, and the reward of an environment; `texts` are those of the tokens."""
    if request is not None and trajectory.prompt.environment == AGENT:
        yield {"from": AGENT, "text": request}
    for turn in turns_of(trajectory):
        reward = {} if turn.reward is None else {"reward": turn.reward}
        yield {"from": turn.speaker, "text": "".join(texts[turn.start : turn.stop]), **reward}


def environment_lines(trajectory: Trajectory, texts: Sequence[str] | None) -> Iterator[str]:
    """Yield a summary of an environment's episode and a line for each turn; `texts` are those of the tokens."""
    yield f"{counted_turns(trajectory)}, {ending_text(trajectory)}"
    for number, turn in enumerate(turns_of(trajectory), 1):
        text = "" if texts is None else f": {_cut(''.join(texts[turn.start : turn.stop]))}"
        yield f"  {number:>3} {turn.label}, {counted(turn.stop - turn.start, 'token')}{text}"


def request_text(trajectory: Trajectory, model: Path | None) -> str | None:
    """The text before the first turn of an agent's episode; None without a tokenizer, and for other trajectories."""
    if not has_tokenizer(model) or trajectory.prompt.environment != AGENT:
        return None
    from infra.models.token_texts import token_texts

    return "".join(token_texts(model, trajectory.prompt.token_ids.to_pylist()))


MAX_CHARACTERS = 60


def turn_lines(found: EpisodeTurns) -> Iterator[str]:
    """Yield a summary, and a line for each turn: branches are indented below the turn that they continue."""
    times = found.times
    yield (
        f"turns: {len(found.turns)}; {times.model:.2f} s in requests, {times.agent:.2f} s between them (tools), "
        f"{times.waiting:.2f} s before the first"
    )
    yield from map(_line, found.turns)


def _line(node: TurnNode) -> str:
    after = "new conversation" if node.after is None else f"after {node.after}"
    took = "not answered" if node.seconds is None else f"{node.response_tokens} drawn in {node.seconds:.2f} s"
    because = f": {_cut(node.error)}" if node.error else ""
    ending = "" if node.finish_reason in (None, "stop") else f" ({node.finish_reason}{because})"
    asked = " ".join(f"[{_cut(each.get('role'))}] {_cut(each.get('content'))}" for each in node.messages[-1:])
    indent = "  " * node.depth
    reward = "" if node.reward is None else f"  (conversation's reward {node.reward:g})"
    tokens = f"{node.context_tokens}+{node.new_tokens} tokens, {took}{ending}"
    return (
        f"  {node.number:>3} {node.start_s:>8.3f} s  {indent}{after}: {tokens}  {asked}{_answer(node)}{reward}".rstrip()
    )


def _answer(node: TurnNode) -> str:
    if node.response is None:
        return "" if node.trained or node.seconds is None else "  (not trained)"
    calls = [_call(call) for call in node.response.get("tool_calls") or ()]
    return f" → {', '.join(calls) if calls else _cut(node.response.get('content'))}"


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function") or {}
    return f"{_cut(function.get('name'))}({_cut(function.get('arguments'))})"


def _cut(content: Any) -> str:
    text = escape_to_one_line(" ".join(str(content or "").split()))
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1]}…"
