"""`laminar lineage`: what a weight version was made from, back to the prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, JsonOption
from pipelines.cli.output import Rows
from pipelines.cli.weights import find_version, read_manifests
from pipelines.log.made_from import Prompted, Step, lineage, with_texts

app = Commands()
LONGEST = 60


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
) -> Rows:
    """Tell what a weight version was made from: its parent, batches, trajectories, and the prompts that these answer.

    \b
    Examples:
      laminar lineage latest
      laminar lineage 1.12 --depth 0 --no-texts
      laminar lineage 1.12 --json | jq '.prompts[].prompt'
    """
    to = address.connect()
    manifests = read_manifests(to)
    wanted = find_version(to, manifests, version)

    def steps() -> Iterator[list[dict[str, Any]]]:
        for step in lineage(to.client, to.run, manifests, wanted, depth or None):
            if texts:
                with_texts(to.client, to.run, step.prompts)
            yield [_facts(step)]

    return Rows(steps(), None, "jsonl" if json else "lines", line=_line)


def _facts(step: Step) -> dict[str, Any]:
    manifest = step.manifest
    return {
        "version": str(manifest.version),
        "parent": None if manifest.parent is None else str(manifest.parent),
        "step": manifest.step,
        "created_at": manifest.created_at,
        "batches": step.batches or list(manifest.batches),
        "missing_batches": sorted(set(manifest.batches) - set(step.batches)) if manifest.parent else [],
        "trajectories": step.trajectories,
        "tokens": step.tokens,
        "reward": step.reward,
        "staleness": {str(age): count for age, count in sorted(step.staleness.items())},
        "made_by": {str(version): count for version, count in sorted(step.made_by.items())},
        "prompts": [_prompt(prompt) for prompt in step.prompts],
    }


def _prompt(prompt: Prompted) -> dict[str, Any]:
    partition, offset = prompt.place
    return {
        "prompt": prompt.prompt,
        "task": prompt.task,
        "text": prompt.text,
        "trajectories": prompt.trajectories,
        "rewards": prompt.rewards,
        "experience": f"{partition}:{offset}",
    }


def _line(facts: Any) -> str:
    if facts["parent"] is None:
        return f"{facts['version']}  the first: the model that the run began with"
    ages = ", ".join(f"{count} of age {age}" for age, count in facts["staleness"].items())
    makers = ", ".join(f"{count} by {version}" for version, count in facts["made_by"].items())
    reward = "-" if facts["reward"] is None else f"{facts['reward']:.3f}"
    lines = [
        f"{facts['version']}  of {facts['parent']}, step {facts['step']}, batches {facts['batches']}: "
        f"{facts['trajectories']} trajectories, {facts['tokens']:,} tokens, mean reward {reward}",
        f"  made {makers}; {ages}",
    ]
    if facts["missing_batches"]:
        lines.append(f"  retention has taken batches {facts['missing_batches']}")
    for prompt in facts["prompts"]:
        rewards = " ".join(f"{reward:g}" for reward in prompt["rewards"])
        text = " ".join((prompt["text"] or "").split())
        cut = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
        lines.append(f"  {prompt['prompt']:<8} rewards {rewards:<24} experiences {prompt['experience']:<8} {cut}")
    return "\n".join(lines)
