"""A killed run is resumed with other numbers of shards: no trajectory is lost, scored twice or trained twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w
from laminar_runs import CommandServer, LaminarRun
from small_runs import EMULATED

from infra.kafka.broker import Broker
from pipelines.inspect.metrics_file import read_metrics

STEPS = 60
"""The kills come after step 2 and 8: a slow machine notices these late."""


@pytest.mark.slow
def test_killed_run_resumes_with_other_numbers_of_shards(
    command_server: CommandServer, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    config = tmp_path / "emulated.toml"
    trainer = {**EMULATED["trainer"], "optimizer_steps": STEPS}
    kafka = {"partitions": 4, "bootstrap_servers": broker.bootstrap_servers}
    experience = {**EMULATED["experience"], "max_shards": 3}
    changed = {"kafka": kafka, "trainer": trainer, "experience": experience}
    config.write_text(tomli_w.dumps({**EMULATED, **changed}))
    run = LaminarRun(command_server, tmp_path, config, run_id)
    try:
        for step, shards, before in ((2, 3, 1), (8, 2, 3)):
            run.until(lambda step=step: last_step(run) >= step, 90, f"step {step}")  # type: ignore[misc]
            run.clean_up()
            run.resume(f"score.shards={shards}", f"experience.shards={shards}")
            for role in ("score", "experience"):
                line = f"{role} has {shards} shards from here on; it had {before}"
                run.until(lambda line=line: line in run.output(), 60, line)  # type: ignore[misc]
        assert run.wait(180) == 0, run.output()
    finally:
        run.clean_up()
    audit = run.audit()
    assert audit["passed"]
    assert (audit["trained"], audit["trained_twice"]) == (STEPS * 32, 0)


def last_step(run: LaminarRun) -> int:
    """The optimizer steps in its metrics so far."""
    file = run.folder / "metrics.jsonl"
    found = read_metrics(file) if file.exists() else []
    return max((metric.step for metric in found if metric.name == "trainer"), default=0)
