"""`laminar simulate`: histories of failures of a whole run on a simulated cluster."""

from __future__ import annotations

import json as json_text
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from infra.files import write_atomically
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import JsonOption
from pipelines.present.output import Report
from pipelines.simulate.configurations import SHAPES
from pipelines.simulate.explore import draw_history, explore, play, read_history, shrink, to_json
from pipelines.simulate.timeline import lines, trace
from pipelines.simulate.world import History

app = Commands()


@app.command()
def simulate(
    count: Annotated[int, typer.Option("--explore", min=1, help="How many histories to play.")] = 100,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The first seed; each history has the next one.")] = 0,
    shape: Annotated[list[str] | None, typer.Option("--shape", help="Only this kind of run; may be repeated.")] = None,
    replay: Annotated[Path | None, typer.Option("--replay", help="Play the history of this file.")] = None,
    timeline: Annotated[bool, typer.Option("--timeline", help="Play one seed, and print its events.")] = False,
    perfetto: Annotated[Path | None, typer.Option("--perfetto", help="Write the events as a trace.")] = None,
    save: Annotated[Path | None, typer.Option("--save", help="Write a failing history to this file.")] = None,
    json: JsonOption = False,
) -> Report:
    """Play histories of failures of a small run, in one process and in virtual time, and check its invariants.

    Every role runs its real code on a simulated Kafka cluster: processes die, pause, come back after their successor,
    and requests are lost, late or executed without a response. One seed is one history, byte for byte. Exits with 1 at
    the first history that violates an invariant, with as few faults as still make it fail.

    \b
    Examples:
      laminar simulate --explore 1000
      laminar simulate --seed 17 --timeline --perfetto history.json
      laminar simulate --explore 200 --shape repack --save failing.json
      laminar simulate --replay failing.json --timeline
    """
    shapes = shape or []
    for name in shapes:
        if name not in SHAPES:
            known = ", ".join(SHAPES)
            raise typer.BadParameter(f"there is no shape {name!r}; choose from {known}", param_hint="--shape")
    logging.disable(logging.WARNING)  # each fault of each history would warn
    try:
        if replay is not None or timeline or perfetto is not None:
            return _one(read_history(replay) if replay is not None else draw_history(seed, shapes), perfetto, json)
        return _many(count, seed, shapes, save, json)
    finally:
        logging.disable(logging.NOTSET)


def _one(drawn: History, perfetto: Path | None, json: bool) -> Report:
    """Play one history and show its events."""
    history = play(drawn, record_events=True)
    if perfetto is not None:
        write_atomically(perfetto, json_text.dumps(trace(history)))
    data = {**to_json(history), "events": [list(event) for event in history.events]}
    return Report(data, lambda: "\n".join([*lines(history), *_outcome(history)]), json, _exit_code(history))


def _many(count: int, seed: int, shapes: list[str], save: Path | None, json: bool) -> Report:
    """Play `count` histories, or up to the first that fails."""
    began, played, failing, virtual_s = time.process_time(), 0, None, 0.0
    for history in explore(range(seed, seed + count), shapes):
        played += 1
        virtual_s += history.ended_s
        if history.failure is not None:
            failing = shrink(history)
            break
    data: dict[str, Any] = {
        "histories": played,
        "virtual_seconds": round(virtual_s, 1),
        "cpu_seconds": round(time.process_time() - began, 2),
        "failing": None if failing is None else to_json(failing),
    }
    if failing is not None and save is not None:
        write_atomically(save, json_text.dumps(to_json(failing), indent=1))

    def text() -> str:
        summary = f"{played} histories, {virtual_s:,.0f} virtual seconds, {data['cpu_seconds']} s of CPU time"
        if failing is None:
            return f"{summary}: no invariant was violated"
        saved = "" if save is None else f"\nlaminar simulate --replay {save} --timeline"
        return "\n".join([summary, *_outcome(failing)]) + saved

    return Report(data, text, json, 0 if failing is None else 1)


def _outcome(history: History) -> Iterator[str]:
    yield f"seed {history.seed}, shape {history.shape!r}, {len(history.faults)} faults, {history.ended_s:.1f} s"
    for fault in history.faults:
        yield f"  {fault}"
    yield "no invariant was violated" if history.failure is None else f"VIOLATED: {history.failure}"


def _exit_code(history: History) -> int:
    return 0 if history.failure is None else 1
