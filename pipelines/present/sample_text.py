"""Scored samples for people: question, reference, responses and rewards, in columns or one below the other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, TypeVar

from rich.style import Style
from rich.table import Table
from rich.text import Text

from infra.counted import counted
from pipelines.inspect.log.samples import AnswerChange, SampleComparison, SampleGroup, count_changes
from pipelines.present.token_colours import has_tokenizer, legend, token_pieces, tokens_of
from pipelines.present.turns import counted_turns, ending_text, request_text, turn_texts, with_speakers
from schemas.plain import to_plain
from schemas.records import Experience

MIN_COLUMN = 36
"""Characters of the narrowest column of samples side by side."""
MAX_CHARS = 1200
"""A longer response is cut in the middle: its beginning and its end matter most."""
MAX_EPISODE_CHARS = 4 * MAX_CHARS
"""The same for an episode of several turns."""
MAX_REFERENCE = 200
_HEAD = 0.6
_BOLD, _DIM, _DIFFERENT = Style(bold=True), Style(dim=True), Style(underline=True)
StyledText = tuple[str, Style]
S = TypeVar("S")


@dataclass(frozen=True)
class SampleStyle:
    """How samples are shown.

    `width`: columns of the terminal; None: no terminal, so samples stand one below the other, without colours.
    `colour`: logprob, version or none. `model`: the folder of the tokenizer, without which there are no colours.
    `per_group`: the most samples shown of a group; None: all. `whole`: long responses are not cut.
    """

    width: int | None = None
    colour: str = "logprob"
    model: Path | None = None
    per_group: int | None = 4
    whole: bool = False

    @property
    def coloured(self) -> bool:
        """Whether tokens are coloured."""
        return self.width is not None and self.colour != "none" and has_tokenizer(self.model)


def group_texts(groups: Sequence[SampleGroup], style: SampleStyle) -> Iterator[Any]:
    """Yield the text of each group, and the legend of the colours."""
    for group in groups:
        yield from _head(group, f"{_counted(group)}, mean reward {group.reward:.2f}")
        shown = group.samples[: style.per_group]
        yield from _side_by_side([(_label(each), _pieces(each, style)) for each in shown], style)
        if hidden := len(group.samples) - len(shown):
            yield Text(f"  … and {hidden} more (--per-prompt 0 shows all)", _DIM)
        yield Text()
    yield from _legend([each for group in groups for each in group.samples], style)


def comparison_texts(comparison: SampleComparison, count: int, style: SampleStyle) -> Iterator[Any]:
    """Yield the first `count` questions of a comparison with both answers, and the legend."""
    old, new = comparison.versions
    counted = count_changes(comparison.changes)
    numbers = ", ".join(f"{counted[name]} {name}" for name in ("better", "worse", "equal"))
    yield f"version {old} → {new}: {len(comparison.changes)} questions answered by both; reward {numbers}"
    shown = comparison.changes[:count]
    for each in shown:
        yield Text()
        yield from _head(each.after, f"reward {each.before.reward:.2f} → {each.after.reward:.2f}")
        before, after = each.before.samples[0], each.after.samples[0]
        pieces = _marked(_pieces(before, style), _pieces(after, style))
        yield from _side_by_side(list(zip(map(_label, (before, after)), pieces, strict=True)), style)
    yield from _legend([change.after.samples[0] for change in shown], style)


def groups_json(groups: Iterable[SampleGroup], model: Path | None = None) -> list[dict[str, Any]]:
    """Return `groups` JSON-ready; samples of episodes with their turns, if folder `model` has a tokenizer."""
    return [
        {
            "prompt": group.prompt.prompt_id,
            "task": group.prompt.task,
            "round": group.prompt.round,
            "question": group.prompt.text,
            "reference": _reference(group),
            "group_size": group.prompt.samples,
            "reward": group.reward,
            "samples": [_sample_json(each, model) for each in group.samples],
        }
        for group in groups
    ]


def comparison_json(comparison: SampleComparison, count: int, model: Path | None = None) -> dict[str, Any]:
    """Return a comparison JSON-ready, with its first `count` questions and the turns of episodes as `groups_json`."""
    old, new = comparison.versions
    counted = count_changes(comparison.changes)
    return {
        "versions": [str(old), str(new)],
        **{name: counted[name] for name in ("better", "worse", "equal")},
        "questions": [_change_json(each, model) for each in comparison.changes[:count]],
    }


def _change_json(each: AnswerChange, model: Path | None) -> dict[str, Any]:
    before, after = groups_json([each.before, each.after], model)
    shared = {name: after[name] for name in ("task", "question", "reference")}
    sides = {
        side: {name: group[name] for name in ("prompt", "round", "reward", "samples")}
        for side, group in (("before", before), ("after", after))
    }
    return {**shared, "change": each.change, **sides}


def _sample_json(experience: Experience, model: Path | None) -> dict[str, Any]:
    trajectory = experience.trajectory
    turns = None
    if trajectory.episode is not None and (texts := tokens_of(trajectory, model).texts) is not None:
        turns = list(turn_texts(trajectory, texts, request_text(trajectory, model)))
    return {
        "trajectory": trajectory.trajectory_id,
        "version": str(trajectory.policy_version) if trajectory.policy_version else None,
        "reward": experience.reward,
        "conversation_rewards": list(experience.conversation_rewards),
        "components": to_plain(experience)["components"],
        "error": experience.error,
        "finish_reason": trajectory.finish_reason,
        "token_sampler": trajectory.token_sampler,
        "ending": None if trajectory.episode is None else trajectory.episode.ending,
        "tokens": len(trajectory.response.token_ids),
        "text": trajectory.text,
        **({} if turns is None else {"turns": turns}),
    }


def _counted(group: SampleGroup) -> str:
    number, size = len(group.samples), group.prompt.samples
    of_all = f"{number} of {size}" if number < size else str(number)
    return f"{of_all} sample{'' if size == 1 else 's'}"


def _head(group: SampleGroup, summary: str) -> Iterator[Text]:
    """Yield the lines above the samples: prompt, task and summary; question; reference."""
    prompt = group.prompt
    yield Text.assemble((prompt.prompt_id, _BOLD), f"  {prompt.task}, {summary}")
    yield _indented("question", prompt.text)
    if reference := _reference(group):
        yield _indented("reference", str(reference))


def _indented(label: str, text: str) -> Text:
    first, *more = text.strip().split("\n")
    return Text("\n").join([Text(f"  {label:<11}{first}"), *(Text(f"{'':<13}{line}") for line in more)])


def _reference(group: SampleGroup) -> Any:
    """Return the reference answer; the whole reference, cut, if it has none."""
    try:
        reference = json.loads(group.prompt.reference)
    except ValueError:
        return group.prompt.reference[:MAX_REFERENCE]
    if isinstance(reference, dict) and "answer" in reference:
        return reference["answer"]
    return json.dumps(reference, ensure_ascii=False)[:MAX_REFERENCE] if reference else None


def _label(experience: Experience) -> str:
    trajectory = experience.trajectory
    tokens = counted(len(trajectory.response.token_ids), "token")
    version = f"version {trajectory.policy_version}, " if trajectory.policy_version else ""
    ending = f", {found}" if (found := ending_text(trajectory)) else ""
    failed = f", reward failed: {experience.error}" if experience.error else ""
    turns = f", {counted_turns(trajectory)}" if trajectory.episode is not None else ""
    name = trajectory.trajectory_id
    return f"{_reward(experience)}  {name}, {version}{tokens}{turns}{ending}{failed}"


def _reward(experience: Experience) -> str:
    """The reward, with its parts if there are several."""
    parts = ", ".join(f"{part.name} {part.value:.2f}" for part in experience.components)
    several = len(experience.components) > 1
    own = ", ".join(f"{each:.2f}" for each in experience.conversation_rewards)
    of_conversations = f", conversations {own}" if own else ""
    return f"reward {experience.reward:.2f}" + (f" ({parts})" if several else "") + of_conversations


def _pieces(experience: Experience, style: SampleStyle) -> list[StyledText]:
    trajectory = experience.trajectory
    episode = trajectory.episode is not None and has_tokenizer(style.model)
    if style.coloured or episode:
        colour = style.colour if style.coloured else "none"
        pieces = token_pieces(tokens_of(trajectory, style.model), colour)
    else:
        pieces = [(trajectory.text, Style())]
    if episode:
        request = request_text(trajectory, style.model)
        pieces = with_speakers(trajectory, pieces, request, _DIM)
    if not any(text.strip() for text, _ in pieces):
        return [("(empty response)", _DIM)]
    return pieces if style.whole else shortened(pieces, MAX_EPISODE_CHARS if episode else MAX_CHARS, _DIM)


def shortened(pieces: list[tuple[str, S]], limit: int, cut: S) -> list[tuple[str, S]]:
    """Return `pieces` with about `limit` characters: a note in style `cut` replaces a middle that is too long."""
    total = sum(len(text) for text, _ in pieces)
    if total <= limit:
        return pieces
    head, tail = int(limit * _HEAD), limit - int(limit * _HEAD)
    begin: list[tuple[str, S]] = []
    end: list[tuple[str, S]] = []
    at = 0
    for text, style in pieces:
        begin.append((text[: max(0, head - at)], style))
        end.append((text[max(0, total - tail - at) :], style))
        at += len(text)
    note = (f"\n… {total - limit:,} characters …\n", cut)
    return [piece for piece in [*begin, note, *end] if piece[0]]


def _marked(before: list[StyledText], after: list[StyledText]) -> tuple[list[StyledText], list[StyledText]]:
    """Return both with the parts that differ underlined."""
    if len(before) == len(after) == 1:  # without tokens all would differ
        return before, after
    marked = (list(before), list(after))
    for tag, *spans in SequenceMatcher(
        None, [text for text, _ in before], [text for text, _ in after], autojunk=False
    ).get_opcodes():
        for pieces, (first, last) in zip(marked, (spans[:2], spans[2:]), strict=True):
            for at in range(first, last) if tag != "equal" else ():
                pieces[at] = (pieces[at][0], pieces[at][1] + _DIFFERENT)
    return marked


def _side_by_side(samples: list[tuple[str, list[StyledText]]], style: SampleStyle) -> Iterator[Any]:
    """Yield the samples in as many columns as fit; without a terminal one below the other."""
    if style.width is None:
        for label, pieces in samples:
            yield Text(f"  {label}")
            lines = "".join(text for text, _ in pieces).strip("\n").split("\n")
            yield Text("\n").join(Text(f"    {line}") for line in lines)
        return
    columns = max(1, min(len(samples), style.width // MIN_COLUMN))
    grid = Table.grid(padding=(0, 2, 1, 0), expand=True)
    for _ in range(columns):
        grid.add_column(ratio=1, overflow="fold")
    cells = [Text("\n").join([Text(label, _BOLD), Text.assemble(*pieces)]) for label, pieces in samples]
    for first in range(0, len(cells), columns):
        row = cells[first : first + columns]
        grid.add_row(*row, *([""] * (columns - len(row))))
    yield grid


def _legend(samples: Sequence[Experience], style: SampleStyle) -> Iterator[Text]:
    if style.coloured and samples:
        versions = sorted({str(span.version) for each in samples for span in each.trajectory.version_spans})
        yield legend(style.colour, versions)
