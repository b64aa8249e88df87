"""`laminar lineage`: the batches, trajectories and prompts from which a weight version was trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from infra.counted import counted
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, JsonOption
from pipelines.cli.weights import find_version
from pipelines.inspect.audit.trim_points import newest_trim_point
from pipelines.inspect.log.lineage import TrainedPrompt, VersionStep, read_step, with_texts
from pipelines.inspect.log.manifests import Manifests, ancestors
from pipelines.present.output import RowOutput, Texts
from schemas.records import TrimPoint, WeightVersion

app = Commands()
MAX_TEXT = 60
"""Characters of a prompt's text in a line."""
VersionAndParent = tuple[WeightVersion, WeightVersion | None]
"""A manifest and that of its parent."""


@app.command("lineage")
def lineage_command(
    version: Annotated[str, typer.Argument(metavar="VERSION", help="epoch.number (1.12), or `latest`.")],
    address: Address,
    depth: Annotated[
        int, typer.Option("--depth", min=0, help="How many versions to go back; 0: to the run's first.")
    ] = 1,
    texts: Annotated[
        bool, typer.Option("--texts/--no-texts", help="Show the prompts' texts, from the experiences topic.")
    ] = True,
    json: JsonOption = False,
) -> RowOutput | Texts:
    """Show from what a weight version was trained: its parent, batches, trajectories, and their prompts.

    \b
    Examples:
      laminar lineage latest
      laminar lineage 1.12 --depth 0 --no-texts
      laminar lineage 1.12 --json | jq '.[].prompts[].prompt'
    """
    connection = address.open_log()
    manifests = Manifests(connection.client, connection.run)
    newest = find_version(connection, manifests, version)

    line = ancestors(manifests, newest, depth or None)
    trim_point = newest_trim_point(connection.client, connection.run)

    def read_prompts(step: VersionStep) -> list[TrainedPrompt]:
        if texts:
            with_texts(connection.client, connection.run, step.prompts)
        return step.prompts

    def rows() -> Iterator[list[dict[str, Any]]]:
        for manifest, parent in _since(trim_point, line):
            if _is_start(trim_point, manifest):
                step, trim = VersionStep(manifest, [], 0, Counter(), Counter(), []), trim_point and trim_point.number
            else:
                step, trim = read_step(connection.client, connection.run, manifest, parent), None
            prompts = [_prompt(prompt) for prompt in read_prompts(step)]
            yield [_to_json(step) | {"prompts": prompts, "trim_point": trim}]

    def texts_of_line() -> Iterator[str]:
        """Yield each part as soon as it is read: batches take longer than manifests, and prompts longest."""
        for manifest, parent in _since(trim_point, line):
            yield _head(manifest)
            if _is_start(trim_point, manifest):
                number = trim_point and trim_point.number
                yield f"  the log before this version is deleted; trim point {number} has its counts"
            elif manifest.parent is not None:
                step = read_step(connection.client, connection.run, manifest, parent)
                if body := _body(step):
                    yield body
                yield from map(_prompt_line, read_prompts(step))

    return RowOutput(rows(), None, "json") if json else Texts(texts_of_line())


def _is_start(trim_point: TrimPoint | None, manifest: WeightVersion) -> bool:
    return trim_point is not None and manifest.version == trim_point.version


def _since(trim_point: TrimPoint | None, line: Iterable[VersionAndParent]) -> Iterator[VersionAndParent]:
    """Yield `line` down to the version at which the log begins."""
    for manifest, parent in line:
        yield manifest, None if _is_start(trim_point, manifest) else parent
        if _is_start(trim_point, manifest):
            return


def _to_json(step: VersionStep) -> dict[str, Any]:
    manifest = step.manifest
    return {
        "version": str(manifest.version),
        "parent": None if manifest.parent is None else str(manifest.parent),
        "step": manifest.step,
        "created_at": manifest.created_at,
        "batches": step.batches or list(manifest.batches),
        "missing_batches": step.missing,
        "trajectories": step.trajectories,
        "tokens": step.tokens,
        "reward": step.reward,
        "staleness": {str(age): count for age, count in sorted(step.staleness.items())},
        "generated_by": {str(version): count for version, count in sorted(step.made_by.items())},
    }


def _prompt(prompt: TrainedPrompt) -> dict[str, Any]:
    return {
        "prompt": prompt.prompt,
        "task": prompt.task,
        "text": prompt.text,
        "trajectories": prompt.trajectories,
        "rewards": prompt.rewards,
        "experience": _position(prompt),
    }


def _head(manifest: WeightVersion) -> str:
    if manifest.parent is None:
        return f"{manifest.version}  first version: the run's initial model"
    return f"{manifest.version}  parent {manifest.parent}, step {manifest.step}, batches {list(manifest.batches)}"


def _body(step: VersionStep) -> str:
    lines = []
    if step.trajectories:
        ages = ", ".join(
            f"{count} trajector{'ies' if count > 1 else 'y'} {counted(age, 'version')}"
            for age, count in sorted(step.staleness.items())
        )
        versions = ", ".join(f"{count} by {version}" for version, count in sorted(step.made_by.items()))
        totals = (
            f"{step.trajectories:,} trajectories, {step.tokens:,} tokens with prompts, mean reward {step.reward:.3f}"
        )
        lines += [
            f"  {totals}",
            f"  generated {versions}; {ages} behind the newest when the batch was decided (staleness)",
        ]
    if step.missing:
        lines.append(f"  batches {step.missing} are deleted by retention or unreadable")
    return "\n".join(lines)


def _prompt_line(prompt: TrainedPrompt) -> str:
    rewards = " ".join(f"{reward:.4g}" for reward in prompt.rewards)
    text = " ".join((prompt.text or "").split())
    cut = text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"
    return f"  {prompt.prompt:<8} rewards {rewards:<24} experiences {_position(prompt):<8} {cut}"


def _position(prompt: TrainedPrompt) -> str:
    partition, offset = prompt.place
    return f"{partition}:{offset}"
