"""Samples in a run's report: a prompt with its responses from the beginning, the middle and the end of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from infra.counted import counted
from infra.escaping import escape_control_characters
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import UnknownTopic
from pipelines.inspect.log.samples import SampleFilter, SampleGroup, find_groups, groups_at
from pipelines.present.sample_text import MAX_CHARS, MAX_EPISODE_CHARS, groups_json, shortened
from pipelines.present.token_colours import SCALE, level, tokens_of
from pipelines.present.turns import request_text, with_speakers

PER_GROUP = 4


def report_samples(client: ClientProperties, run: str, model: Path | None) -> list[dict[str, Any]]:
    """Return the first, a middle and the last training group of `run`, JSON-ready; fewer if it has fewer.

    `pieces` of a sample are its tokens as pairs of text and logprob (null: not from the policy), if `model` has a
    tokenizer. Reads only three places of the topic.
    """
    wanted = SampleFilter("train")
    try:
        places = {
            "first": groups_at(client, run, wanted, 0.0),
            "middle": groups_at(client, run, wanted, 0.5),
            "last": find_groups(client, run, wanted, "newest", 1),
        }
    except UnknownTopic:
        return []
    found: dict[str, dict[str, Any]] = {}
    for place, groups in places.items():
        for group in groups:
            found.setdefault(group.prompt.prompt_id, {"place": place, **_group_json(group, model)})
    return list(found.values())


def _group_json(group: SampleGroup, model: Path | None) -> dict[str, Any]:
    (result,) = groups_json([group])
    result["samples"] = [
        {**each, "pieces": _pieces(experience, model)}
        for each, experience in zip(result["samples"][:PER_GROUP], group.samples, strict=False)
    ]
    return result


def _pieces(experience: Any, model: Path | None) -> list[tuple[str, float | None]]:
    trajectory = experience.trajectory
    tokens = tokens_of(trajectory, model)
    pieces: list[tuple[str, float | None]] = [(trajectory.text, None)]
    if tokens.texts is not None:
        logprobs = (logprob if own else None for logprob, own in zip(tokens.logprobs, tokens.from_policy, strict=True))
        pieces = list(zip(tokens.texts, logprobs, strict=True))
        if trajectory.episode is not None:
            pieces = with_speakers(trajectory, pieces, request_text(trajectory, model), None)
    return shortened(pieces, MAX_CHARS if trajectory.episode is None else MAX_EPISODE_CHARS, None)


def samples_section(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return the section of the page for the result of `report_samples`; all text is escaped."""
    if not groups:
        return ""
    legend = "".join(
        f'<span class="key"><i class="p{at}"></i>{f"≥ {lowest:g}" if lowest > -9 else "lower"}</span>'
        for at, (lowest, _) in enumerate(SCALE)
    )
    note = f'<p class="legend">Colour: the logprob of each token when it was generated. {legend}</p>'
    return f"<h2>Samples</h2>{''.join(map(_group, groups))}{note}"


def _group(group: Mapping[str, Any]) -> str:
    title = f"{group['place']}: {group['prompt']}, {group['task']}, mean reward {group['reward']:.2f}"
    reference = (
        "" if group["reference"] is None else f'<p class="note">reference: {escape(str(group["reference"]))}</p>'
    )
    samples = "".join(map(_sample, group["samples"]))
    question = f'<pre class="sample">{escape(group["question"])}</pre>'
    return (
        f'<div class="card wide"><h3>{escape(title)}</h3>{question}{reference}<div class="plots">{samples}</div></div>'
    )


def _sample(sample: Mapping[str, Any]) -> str:
    parts = sample.get("components") or ()
    reward = f"reward {sample['reward']:.2f}"
    if len(parts) > 1:
        shown = ", ".join(f"{part['name']} {part['value']:.2f}" for part in parts)
        reward += f" ({shown})"
    tokens = counted(sample["tokens"], "token")
    label = f"{reward} · {sample['trajectory']} · version {sample['version']} · {tokens}"
    pieces = "".join(_piece(*piece) for piece in sample["pieces"])
    return f'<div><p class="note">{escape(label)}</p><pre class="sample">{pieces}</pre></div>'


def _piece(text: str, logprob: float | None) -> str:
    shown = escape(escape_control_characters(text))
    if logprob is None:
        return shown
    return f'<span class="p{level(logprob)}">{shown}</span>'
