"""`laminar import` on a real broker: a dataset becomes experience of another run, also after a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from exported_topics import Laminar, Topics

from infra.kafka.broker import Broker
from infra.kafka.ranges import partition_ranges
from infra.kafka.topic_reader import read_topic
from schemas.records import Experience
from schemas.topics import EXPERIENCES

pytestmark = pytest.mark.usefixtures("killed_programs")

GROUPS = 1000
IMPORT = "from pipelines.cli.main import main; main()"


def experiences(topics: Topics, run: str) -> list[Experience]:
    return [row for record in read_topic(topics.client, EXPERIENCES.name(run)) for row in record.rows]


def test_import_resumes_after_a_kill_without_duplicates(
    broker: Broker, topics: Topics, laminar: Laminar, tmp_path: Path
) -> None:
    other = Topics(broker, f"{topics.run}-b")
    other.close()
    topics.write(range(GROUPS))
    assert laminar("export", "experiences", str(tmp_path), "--run", topics.run)[0] == 0
    arguments = ("import", str(tmp_path), "--run", other.run, "--json")
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", IMPORT, *arguments, "-b", broker.bootstrap_servers],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def has_written() -> bool:
        return any(held.end for held in partition_ranges(topics.client, EXPERIENCES.name(other.run)).values())

    while not has_written():
        assert process.poll() is None or has_written()
        time.sleep(0.02)
    process.kill()
    process.wait()
    results = [laminar(*arguments) for _ in range(2)]
    assert [code for code, _, _ in results] == [0, 0], results
    first, again = (json.loads(out) for _, out, _ in results)
    assert first["trajectories"] in (2 * GROUPS, 0)  # 0: it had written all rows before the kill
    assert again["trajectories"] == 0
    rows = experiences(topics, other.run)
    assert len(rows) == 2 * GROUPS
    assert {e.trajectory.trajectory_id for e in rows} == {f"i{n}.{m}" for n in range(GROUPS) for m in (0, 1)}
    assert len({e.trajectory.prompt.round for e in rows}) == 2 * GROUPS
    assert {e.reward for e in rows if e.trajectory.member == 0} == {1.0}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(("nowhere",), "is not an export"), ((), "Missing argument"), (("DIR",), "there is no topic")],
)
def test_import_reports_errors_in_one_line(
    topics: Topics, laminar: Laminar, tmp_path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    if "DIR" in arguments:
        assert laminar("export", "experiences", str(tmp_path), "--run", topics.run)[0] == 0
    code, _, err = laminar(
        "import", *(str(tmp_path) if argument == "DIR" else argument for argument in arguments), "--run", "nobody"
    )
    assert code
    assert reason in " ".join(err.replace("│", " ").split())
