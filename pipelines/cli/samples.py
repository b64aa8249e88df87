"""`laminar samples`: what the model answers, with rewards; the same questions under two versions."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from infra.name_lookup import suggest_name
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, ColourOption, JsonOption, ModelOption, RunClient
from pipelines.cli.trajectory import model_of, settings_of
from pipelines.present.output import Report, Texts
from schemas.records.versions import NAMES

if TYPE_CHECKING:
    from pipelines.inspect.log.samples import SampleFilter
    from schemas.identity import Purpose
    from schemas.records import PolicyVersion

app = Commands()
_PROMPT = re.compile(r"([pei](?:0|[1-9]\d{0,17}))(?:\.\d{1,6})?")
DEFAULT_COUNT, DEFAULT_CHANGES = 3, 5


@app.command()
def samples(
    address: Address,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="Prompts by id (p12, e7); by default the newest of training."),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The prompts with the highest mean reward.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The prompts with the lowest mean reward.")] = False,
    task: Annotated[str | None, typer.Option("--task", help="Only of this task.")] = None,
    version: Annotated[
        str | None,
        typer.Option(
            "--version", metavar="V [V]", help="Only of this weight version (epoch.number, latest); two: compare them."
        ),
    ] = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="The same questions under the first and the last version that answered.")
    ] = False,
    heldout: Annotated[
        bool | None,
        typer.Option("--heldout/--training", help="Held-out or training samples; to compare: by default held-out."),
    ] = None,
    count: Annotated[
        int | None, typer.Option("-n", "--count", min=1, help="How many prompts; by default 3, or 5 to compare.")
    ] = None,
    per_prompt: Annotated[int, typer.Option("--per-prompt", min=0, help="How many samples of a prompt; 0: all.")] = 4,
    full: Annotated[bool, typer.Option("--full", help="Do not cut long responses.")] = False,
    colour: ColourOption = "logprob",
    model: ModelOption = None,
    json: JsonOption = False,
) -> Report | Texts:
    """Show what the model answers: each prompt with its samples side by side, their rewards, and the reference.

    With two versions or --diff it shows the same questions under both, the largest change of reward first; by default
    held-out questions. Episodes are shown with their turns: what the model said, what its environment or agent put
    between, and the answer that the agent reported. --best and --worst read the whole topic, the default only its end.

    \b
    Examples:
      laminar samples
      laminar samples --worst --task gcd -n 5
      laminar samples p12 --per-prompt 0 --full
      laminar samples --version 1.0 latest
      laminar samples --diff --json | jq '.better, .worse'
    """
    from pipelines.inspect.log.samples import SampleFilter, compare_versions, find_groups
    from pipelines.present.sample_text import SampleStyle, comparison_json, comparison_texts, group_texts, groups_json

    names = [name.strip() for name in (version or "").split(",") if name.strip()]
    names += [word for word in prompts or () if names and re.fullmatch(NAMES, word)]
    groups = frozenset(_group_id(word) for word in prompts or () if word not in names)
    _check(best, worst, diff, groups, names)
    comparing = diff or len(names) == 2
    connection = address.open_log()
    versions = _versions(connection, names)
    training = not (heldout or (heldout is None and comparing))
    purpose: Purpose | None = None if groups else "train" if training else "evaluation"
    wanted = SampleFilter(purpose, task, frozenset(versions), groups)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    style = SampleStyle(width, colour, model or model_of(address.folder), per_prompt or None, full)
    if comparing:
        pair = (versions[0], versions[1]) if len(versions) == 2 else None
        found = compare_versions(connection.client, connection.run, wanted, pair)
        if found is None or not found.changes:
            nothing = _nothing(connection, wanted, address.folder)
            hint = "try --training" if heldout is None else f"`{address.command('weights list')}` shows the versions"
            raise RuntimeError(f"{nothing} by two versions to the same question: {hint}")
        most = count or DEFAULT_CHANGES
        return (
            Report(comparison_json(found, most, style.model), str, True)
            if json
            else Texts(comparison_texts(found, most, style))
        )
    order: Literal["newest", "best", "worst"] = "best" if best else "worst" if worst else "newest"
    most = count or max(DEFAULT_COUNT, len(groups))
    listed = find_groups(connection.client, connection.run, wanted, order, most)
    if not listed:
        raise RuntimeError(
            f"{_nothing(connection, wanted, address.folder)}: see `{address.command('topics stats experiences')}`"
        )
    return Report(groups_json(listed, style.model), str, as_json=True) if json else Texts(group_texts(listed, style))


def _check(best: bool, worst: bool, diff: bool, groups: frozenset[str], names: list[str]) -> None:
    """Raise typer.BadParameter if the options exclude each other."""
    comparing = diff or len(names) > 1
    if best and worst:
        raise typer.BadParameter("--best and --worst exclude each other")
    if len(names) > 2 or (diff and len(names) == 1):
        raise typer.BadParameter("two versions are compared: give --version OLD NEW", param_hint="--version")
    if comparing and (best or worst or groups):
        raise typer.BadParameter("--best, --worst and prompts do not apply to a comparison of versions")


def _group_id(text: str) -> str:
    """Return the prompt id of a prompt or trajectory id. Raises typer.BadParameter."""
    found = _PROMPT.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a prompt id, such as p12 or e7", param_hint="PROMPT")
    return found[1]


def _versions(connection: RunClient, names: list[str]) -> list[PolicyVersion]:
    """Return the versions that `names` name, the oldest first."""
    if not names:
        return []
    from pipelines.cli.weights import find_version
    from pipelines.inspect.log.manifests import Manifests

    manifests = Manifests(connection.client, connection.run)
    return sorted(find_version(connection, manifests, name) for name in names)


def _known_tasks(task: str, folder: Path | None) -> str:
    """Return the nearest task of the run's configuration, or all of them, in parentheses; empty if `task` is one."""
    tasks = (settings_of(folder) or {}).get("prompts", {}).get("tasks", [])
    names = [each.get("name") or each.get("task", "") for each in tasks]
    return "" if task in names or not names else f" ({suggest_name(task, names).removeprefix('; ')})"


def _nothing(connection: RunClient, wanted: SampleFilter, folder: Path | None) -> str:
    kind = {"train": "training ", "evaluation": "held-out ", None: ""}[wanted.purpose]
    parts = [f"of task {wanted.task!r}{_known_tasks(wanted.task, folder)}"] if wanted.task else []
    parts += [f"of version {' or '.join(map(str, sorted(wanted.versions)))}"] if wanted.versions else []
    parts += [f"of prompt {' or '.join(sorted(wanted.groups))}"] if wanted.groups else []
    return " ".join([f"run {connection.run} has no scored {kind}samples", *parts])
