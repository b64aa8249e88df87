"""`laminar train memory`: the memory of a trainer rank, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from pipelines.cli.options import JsonOption
from pipelines.present.output import Report, table

GB = 10**9


def memory(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="A run's configuration; without it, the documented set-ups."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="A model folder; by default the configuration's.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="trainer.KEY=VALUE", help="Change the configuration; may be repeated."),
    ] = None,
    json: JsonOption = False,
) -> Report:
    """Compute the memory that a trainer rank needs for a model, by purpose, in 10^9 bytes.

    Only the model's config and the headers of its weight files are read. Without CONFIG the table has the set-ups of
    docs/training.md: nodes of 8 GPUs of 80 GB, bfloat16, gradient checkpointing, 16,384 tokens a micro-batch.

    \b
    Examples:
      laminar train memory
      laminar train memory config.toml --model models/Qwen2.5-7B --set trainer.ranks=4
      laminar train memory --json | jq .rows
    """
    rows = _target_rows() if config is None else [_model_row(config, model, changes or [])]
    shown = [
        {name: f"{value:.1f}" if isinstance(value, float) else value for name, value in row.items()} for row in rows
    ]
    return Report({"rows": rows}, lambda: table(shown, tuple(rows[0])), as_json=json)


def _target_rows() -> list[dict[str, Any]]:
    from operators.trainer.target_models import TARGETS

    return [
        {"model": each.model, "nodes": each.nodes, "ranks": each.ranks, **_gigabytes(each.plan().parts)}
        for each in TARGETS
    ]


def _model_row(file: Path, model: Path | None, changes: list[str]) -> dict[str, Any]:
    from operators.trainer.memory_plan import plan_memory, shape_of
    from pipelines.config import load_config

    config = load_config(file, changes)
    folder = config.model_folder() if model is None else model
    try:
        plan = plan_memory(shape_of(folder), config.trainer.ranks, config.trainer.learner)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"the model in {folder}: {error}") from error
    return {"model": folder.name, "ranks": config.trainer.ranks, **_gigabytes(plan.parts)}


def _gigabytes(parts: Mapping[str, int]) -> dict[str, float]:
    """The `parts` and their sum, in 10^9 bytes."""
    return {name: size / GB for name, size in parts.items()} | {"total": sum(parts.values()) / GB}
