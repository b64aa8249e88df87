"""`laminar lineage`: what a weight version was made from, back to the prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, JsonOption
from pipelines.cli.weights import find_version
from pipelines.inspect.audit.trim_points import newest_trim_point
from pipelines.inspect.log.lineage import TrainedPrompt, VersionStep, ancestors, read_step, with_texts
from pipelines.inspect.log.manifests import Manifests
from pipelines.present.output import RowOutput, Texts
from schemas.records import TrimPoint, WeightVersion

app = Commands()
LONGEST = 60
Link = tuple[WeightVersion, WeightVersion | None]
"""A manifest and that of its parent."""


@app.command("lineage")
def lineage_command(
    version: Annotated[str, typer.Argument(metavar="VERSION", help="epoch.number, or `latest`.")],
    address: Address,
    depth: Annotated[
        int, typer.Option("--depth", min=0, help="So many versions back; 0: to the first of the run.")
    ] = 1,
    texts: Annotated[
        bool, typer.Option("--texts/--no-texts", help="With what the prompts say, from the experiences topic.")
    ] = True,
    json: JsonOption = False,
) -> RowOutput | Texts:
    """Tell what a weight version was made from: its parent, batches, trajectories, and the prompts that these answer.

    \b
    Examples:
      laminar lineage latest
      laminar lineage 1.12 --depth 0 --no-texts
      laminar lineage 1.12 --json | jq '.prompts[].prompt'
    """
    to = address.connect()
    manifests = Manifests(to.client, to.run)
    wanted = find_version(to, manifests, version)

    line = ancestors(manifests, wanted, depth or None)
    trim_point = newest_trim_point(to.client, to.run)

    def read_prompts(step: VersionStep) -> list[TrainedPrompt]:
        if texts:
            with_texts(to.client, to.run, step.prompts)
        return step.prompts

    def rows() -> Iterator[list[dict[str, Any]]]:
        for manifest, parent in _since(trim_point, line):
            if _is_start(trim_point, manifest):
                step, trim = VersionStep(manifest, [], 0, Counter(), Counter(), []), trim_point and trim_point.number
            else:
                step, trim = read_step(to.client, to.run, manifest, parent), None
            prompts = [_prompt(prompt) for prompt in read_prompts(step)]
            yield [_facts(step) | {"prompts": prompts, "begins_at_trim_point": trim}]

    def told() -> Iterator[str]:
        """Each line as soon as it is known: batches take longer than manifests, and prompts longest."""
        for manifest, parent in _since(trim_point, line):
            yield _head(manifest)
            if _is_start(trim_point, manifest):
                yield f"  the log begins here since trim {trim_point and trim_point.number}, which counts all before"
            elif manifest.parent is not None:
                step = read_step(to.client, to.run, manifest, parent)
                if body := _body(step):
                    yield body
                yield from map(_prompt_line, read_prompts(step))

    return RowOutput(rows(), None, "jsonl") if json else Texts(told())


def _is_start(trim_point: TrimPoint | None, manifest: WeightVersion) -> bool:
    return trim_point is not None and manifest.version == trim_point.version


def _since(trim_point: TrimPoint | None, line: Iterable[Link]) -> Iterator[Link]:
    """`line` up to the version at which the log begins."""
    for manifest, parent in line:
        yield manifest, None if _is_start(trim_point, manifest) else parent
        if _is_start(trim_point, manifest):
            return


def _facts(step: VersionStep) -> dict[str, Any]:
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
        "made_by": {str(version): count for version, count in sorted(step.made_by.items())},
    }


def _prompt(prompt: TrainedPrompt) -> dict[str, Any]:
    return {
        "prompt": prompt.prompt,
        "task": prompt.task,
        "text": prompt.text,
        "trajectories": prompt.trajectories,
        "rewards": prompt.rewards,
        "experience": _place(prompt),
    }


def _head(manifest: WeightVersion) -> str:
    if manifest.parent is None:
        return f"{manifest.version}  the first: the model that the run began with"
    return f"{manifest.version}  of {manifest.parent}, step {manifest.step}, batches {list(manifest.batches)}"


def _body(step: VersionStep) -> str:
    lines = []
    if step.trajectories:
        ages = ", ".join(f"{count} of age {age}" for age, count in sorted(step.staleness.items()))
        makers = ", ".join(f"{count} by {version}" for version, count in sorted(step.made_by.items()))
        told = f"{step.trajectories:,} trajectories, {step.tokens:,} tokens, mean reward {step.reward:.3f}"
        lines += [f"  {told}", f"  made {makers}; {ages}"]
    if step.missing:
        lines.append(f"  retention has taken batches {step.missing}, or they cannot be read")
    return "\n".join(lines)


def _prompt_line(prompt: TrainedPrompt) -> str:
    rewards = " ".join(f"{reward:g}" for reward in prompt.rewards)
    text = " ".join((prompt.text or "").split())
    cut = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    return f"  {prompt.prompt:<8} rewards {rewards:<24} experiences {_place(prompt):<8} {cut}"


def _place(prompt: TrainedPrompt) -> str:
    partition, offset = prompt.place
    return f"{partition}:{offset}"
