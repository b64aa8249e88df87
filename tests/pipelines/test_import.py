"""`laminar import` on a real broker: a dataset as experience of another run, also where it is killed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from exported_topics import Laminar, Topics

from infra.kafka.broker import Broker
from infra.kafka.ranges import partition_ranges
from infra.kafka.reading import read_topic
from schemas.records import Experience
from schemas.topics import EXPERIENCES

pytestmark = pytest.mark.usefixtures("killed_programs")

GROUPS = 3000
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
    words = ("import", str(tmp_path), "--run", other.run, "--json")
    doomed = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", IMPORT, *words, "-b", broker.bootstrap_servers],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    name = EXPERIENCES.name(other.run)
    while not any(held.end for held in partition_ranges(topics.client, name).values()):
        assert doomed.poll() is None
        time.sleep(0.02)
    os.kill(doomed.pid, signal.SIGKILL)
    doomed.wait()
    answers = [laminar(*words) for _ in range(2)]
    assert [code for code, _, _ in answers] == [0, 0], answers
    done, again = (json.loads(out) for _, out, _ in answers)
    assert done["trajectories"] in (2 * GROUPS, 0)  # 0: it had written all when it was killed
    assert again["trajectories"] == 0
    found = experiences(topics, other.run)
    assert len(found) == 2 * GROUPS
    assert {e.trajectory.trajectory_id for e in found} == {f"i{n}.{m}" for n in range(GROUPS) for m in (0, 1)}
    assert len({e.trajectory.prompt.round for e in found}) == 2 * GROUPS
    assert {e.reward for e in found if e.trajectory.member == 0} == {1.0}


@pytest.mark.parametrize(
    ("words", "reason"), [(("nowhere",), "holds no export"), ((), "Missing argument"), (("DIR",), "there is no topic")]
)
def test_import_reports_errors_in_one_line(
    topics: Topics, laminar: Laminar, tmp_path: Path, words: tuple[str, ...], reason: str
) -> None:
    if "DIR" in words:
        assert laminar("export", "experiences", str(tmp_path), "--run", topics.run)[0] == 0
    code, _, err = laminar("import", *(str(tmp_path) if word == "DIR" else word for word in words), "--run", "nobody")
    assert code
    assert reason in " ".join(err.replace("│", " ").split())
