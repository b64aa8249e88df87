"""Histories of failures of whole runs violate no invariant, and one seed is one history."""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import typer
from clean_histories import DIGESTS, play_clean, quiet
from mutations import MUTATIONS
from regressions import REGRESSIONS, fails, play_without_the_fix, recorded

from infra.kafka.note import Note
from infra.kafka.simulated_producer import NOT_EXECUTED
from infra.kafka.topic_reader import schema_of
from infra.simulation.cluster import Place
from infra.simulation.network import SimulatedConnection
from operators.io.ledger import TrajectoryLedger
from operators.rollout.engine import KV
from operators.rollout.waiting_assignments import IncomingKV
from pipelines.cli import simulate as simulate_module
from pipelines.cli.simulate import simulate
from pipelines.present.progress import ProgressPrinter
from pipelines.simulate.configurations import LONG_EVALUATION, LONG_QUESTIONS, SHAPES, configuration, wiring
from pipelines.simulate.explore import draw_history, play, read_history, shrink, to_json
from pipelines.simulate.faults import Fault, FaultKind
from pipelines.simulate.invariants import Invariants, InvariantViolated
from pipelines.simulate.observer import Committed
from pipelines.simulate.timeline import lines, trace
from pipelines.simulate.world import SimulatedHistory, World
from schemas.codec import record_type
from schemas.records import Trajectory
from schemas.topics import RESTORE, SETTLED, TRAJECTORIES

__all__ = ["quiet"]
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("shape", SHAPES)
def test_histories_violate_no_invariant(shape: str) -> None:
    play_clean(shape, range(1, 2))  # the test of digests plays seed 0, test_histories_of_*.py more


@pytest.mark.parametrize("shape", SHAPES)
def test_history_is_the_same_on_every_machine(shape: str) -> None:
    history = play(draw_history(0, [shape]))
    assert history.failure is None, json.dumps(to_json(history))
    expected = json.loads(DIGESTS.read_text())
    assert history.digest == expected[shape], "if that is intended: python tests/pipelines/simulate/clean_histories.py"


@pytest.mark.parametrize("name", REGRESSIONS)
def test_regression_history_fails_without_its_fix(name: str) -> None:
    history = recorded(name)
    assert play(history).failure is None
    hint = f"another history: python tests/pipelines/simulate/regressions.py {name}"
    assert fails(name, play_without_the_fix(name, history)), hint


def test_first_evaluation_does_not_stop_training() -> None:
    """On one replica, whose first round has six times as many questions as it has slots."""
    history = play(SimulatedHistory(0, LONG_EVALUATION, ()), record_events=True)
    assert history.failure is None
    events = [text for _, _, text in history.events]
    answered = [at for at, text in enumerate(events) if re.match(r"e(\d|1\d|2[0-3])\.0: stop .* version 1\.0$", text)]
    assert len(answered) == LONG_QUESTIONS
    assert "version 1.3, batches [2], step 3" in events[: answered[-1]]


def test_slow_role_polls_every_two_seconds() -> None:
    """Also one that only waits for records, as score does."""
    history = play(SimulatedHistory(0, "plain", (Fault(4.0, "slow", "score", 8.0, 0),)), record_events=True)
    assert history.failure is None
    scored = sorted({at for at, _, text in history.events if text.endswith(" scored") and 5.0 < at < 13.0})
    assert len(scored) > 2
    assert all(later - earlier > 1.9 for earlier, later in pairwise(scored[:-1]))


def test_restart_of_the_run_starts_every_role_again() -> None:
    history = play(SimulatedHistory(0, "plain", (Fault(6.0, "restart_run", "score", 4.0, 0),)), record_events=True)
    assert history.failure is None
    starts = [(role, at) for at, role, text in history.events if text == "starts"]
    again = [(role, at) for role, at in starts if at > 6.0]
    assert sorted(role for role, _ in again) == sorted(role for role, at in starts if at < 6.0)
    assert again[-1] == ("score", 10.0)


@pytest.mark.parametrize(("at", "final"), [(5.0, ["2.4"]), (16.0, ["1.3", "2.4"])])
def test_run_is_resumed_with_a_later_goal(at: float, final: list[str]) -> None:
    history = play(SimulatedHistory(0, "with a goal", (Fault(at, "extend_run", "score", 4.0, 0),)), record_events=True)
    assert history.failure is None
    texts = [text for _, _, text in history.events]
    assert [text.split()[1].rstrip(",") for text in texts if text.endswith(", final")] == final


def test_restart_of_the_run_ends_replaced_processes() -> None:
    faults = (Fault(5.0, "replace", "score", 10.0, 0), Fault(6.0, "restart_run", "prompts", 4.0, 1))
    world = World(configuration("plain"), wiring("plain"), SimulatedHistory(0, "plain", faults), until=7.0)
    alive = list[int]()
    for at in (5.5, 6.5):
        world.scheduler.at(at, lambda: alive.append(sum(each.alive for each in world.roles["score"].processes)))
    assert world.run().failure is None
    assert alive[0] == 2
    assert alive[1] < 2  # the new one may have started


@pytest.mark.parametrize("shape", ["repack", "relays and moves"])
def test_history_is_the_same_in_every_process(shape: str) -> None:
    code = f"from pipelines.simulate.explore import *; print(play(draw_history(3, [{shape!r}])).digest)"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    other = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert other.stdout.strip() == play(draw_history(3, [shape])).digest


@pytest.mark.parametrize(
    "name",
    ["note_is_lost", "lease_counter_is_lost", "prompt_number_is_lost"],
)
def test_planted_defect_is_found_within_six_histories(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    MUTATIONS[name](monkeypatch)  # tests/soak/simulated_mutations.py has all of them
    assert any(play(draw_history(seed)).failure for seed in range(6))


def test_defects_of_weights_trims_and_upgrades_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    trims = SimulatedHistory(0, "plain", (Fault(14.0, "trim", "placement", 30.0, 0),))
    read_again = (Fault(12.0, "trim", "placement", 30.0, 0), Fault(12.5, "kill", "placement", 3.0, 1))
    upgrade = SimulatedHistory(0, "plain", (Fault(8.0, "upgrade_run", "score", 2.0, 0),))
    cases = {
        "incomplete_version_is_sealed": (SimulatedHistory(0, "relays", ()), "with other bytes than"),
        "trim_writes_no_trim_point": (trims, "trajectories were assigned; the audit"),
        "trim_ignores_what_roles_need": (
            SimulatedHistory(0, "plain", read_again),
            "placement ended with LogTruncated",
        ),
        "earlier_versions_of_records_are_not_read": (upgrade, "unknown schema b'ReplicaStatus/3'"),
    }
    for name, (history, reason) in cases.items():
        assert play(history).failure is None
        with monkeypatch.context() as patch:
            MUTATIONS[name](patch)
            assert reason in (play(history).failure or "nothing was found"), name


@pytest.mark.parametrize("kind", ["markers", "move_coordinator"])
def test_run_completes_while_coordinators_are_disturbed(kind: FaultKind, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, execute = Counter[str](), SimulatedConnection.call

    def call(self: SimulatedConnection, request: str, *rest: Any, **options: Any) -> Any:
        try:
            return execute(self, request, *rest, **options)
        except NOT_EXECUTED as error:
            refused[type(error).__name__] += 1
            raise

    monkeypatch.setattr(SimulatedConnection, "call", call)
    faults = tuple(Fault(2.0, kind, role, 6.0, number) for number, role in enumerate(("placement", "trainer")))
    assert play(SimulatedHistory(0, "plain", faults)).failure is None
    assert refused["ConcurrentTransactions" if kind == "markers" else "NotCoordinator"]


@pytest.mark.parametrize("kind", ["stop", "notice"])
def test_process_that_is_asked_to_end_commits_its_outputs_first(kind: FaultKind) -> None:
    """The other replica resumes what it was generating from its last token."""
    history = play(SimulatedHistory(0, "plain", (Fault(5.0, kind, "rollout-0", 12.0, 0),)), record_events=True)
    assert history.failure is None
    events = [(at, text) for at, role, text in history.events if role == "rollout-0"]
    (ended,) = (at for at, text in events if text == "ends: None")
    assert ended < 5.0 + (1.0 if kind == "stop" else 12.0)
    assert [text for at, text in events if at > ended] == ["starts"]


def test_trajectories_move_with_their_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, take = list[KV | None](), IncomingKV.take

    def record(self: IncomingKV, *args: Any) -> KV | None:
        taken.append(take(self, *args))
        return taken[-1]

    monkeypatch.setattr(IncomingKV, "take", record)
    assert play(SimulatedHistory(0, "relays and moves", ())).failure is None
    assert len([kv for kv in taken if kv is not None and len(kv.data)]) > 2


def test_trim_deletes_records_and_a_killed_trim_is_repeated() -> None:
    killed, whole = Fault(14.0, "trim", "placement", 0.15, 0), Fault(15.0, "trim", "placement", 30.0, 1)
    world = World(
        configuration("plain"), wiring("plain"), SimulatedHistory(0, "plain", (killed, whole)), record_events=True
    )
    history = world.run()
    assert history.failure is None
    texts = [text for _, role, text in history.events if role == "trim"]
    assert [text for text in texts if text.endswith("records are deleted")]
    settled, notes = (world.cluster.log(Place(topic.name("simulated"), 0)) for topic in (SETTLED, RESTORE))
    assert settled.begin > 0
    assert not notes.begin


def test_upgraded_run_has_read_records_of_the_earlier_release() -> None:
    upgrade = Fault(8.0, "upgrade_run", "score", 2.0, 0)
    world = World(configuration("plain"), wiring("plain"), SimulatedHistory(0, "plain", (upgrade,)))
    assert world.run().failure is None
    log = world.cluster.log(Place(TRAJECTORIES.name("simulated"), 0))
    versions = [schema_of(message.headers) for _, message in log.fetch(0, committed=True)]
    newest = record_type(Trajectory).schema
    assert (versions[0] != newest, versions[-1]) == (True, newest)


PAUSED = SimulatedHistory(
    0, "plain", (Fault(4.0, "pause_run", "placement", 12.0, 0), Fault(7.0, "kill", "placement", 1.0, 1))
)
"""Placement starts again while the run is paused."""


def test_paused_run_begins_nothing_and_completes_after_the_pause() -> None:
    history = play(replace(PAUSED), record_events=True)
    assert history.failure is None
    texts = [text for _, _, text in history.events]
    paused, ended = texts.index("request 1: the run is paused"), texts.index("request 2: the run continues")
    begun = [at for at, text in enumerate(texts) if re.search(r": assigned to [^,]*, lease \d+(, attempt \d+)?$", text)]
    versions = [at for at, text in enumerate(texts) if text.startswith("version ")]
    assert not [at for at in begun if paused < at < ended]
    assert [at for at in begun if at > ended]
    assert [at for at in versions if paused < at < ended]  # what had begun is trained


def test_batch_above_the_staleness_bound_is_found() -> None:
    invariants = Invariants(configuration("drop by age"))
    part = SimpleNamespace(batch=0, index=0, count=1, staleness=pa.array([0, 1], pa.int32()), trajectory_ids=())
    with pytest.raises(InvariantViolated, match="1 versions old, above max_staleness 0 with over_age 'drop'"):
        invariants._batch(Committed("batches", 0, 0, part), part)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["placement_ignores_pauses", "pause_is_lost_at_a_start"])
def test_assignment_in_a_paused_run_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    MUTATIONS[name](monkeypatch)
    assert "placement knows that the run is paused" in (play(replace(PAUSED)).failure or "")


def forget_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect: a start begins at the first record, and no ledger knows what has finished."""
    decode = Note.decode
    monkeypatch.setattr(Note, "decode", lambda text: replace(decode(text), offsets={}))
    monkeypatch.setattr(TrajectoryLedger, "add", lambda self, key, size, emission: True)


def test_failing_history_is_shortened_saved_and_replayed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forget_finished(monkeypatch)
    kill = Fault(12.0, "kill", "score", 1.0, 0)
    others = tuple(Fault(at, "slow", "trainer", 1.0, n) for n, at in enumerate((2.0, 3.0, 9.0), 1))
    drawn = replace(draw_history(0, ["plain"]), faults=(others[0], others[1], kill, others[2]))
    failing = play(drawn)
    assert failing.failure is not None
    assert "scored twice" in failing.failure
    shortest = shrink(failing)
    assert set(shortest.faults) <= {kill}
    file = tmp_path / "history.json"
    file.write_text(json.dumps(to_json(shortest)))
    replayed = play(read_history(file), record_events=True)
    assert (replayed.failure, replayed.digest) == (shortest.failure, shortest.digest)
    assert any(shortest.failure in line for line in lines(replayed))
    events = trace(replace(replayed, faults=(kill,)))["traceEvents"]
    tracks = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    (drawn_fault,) = (event for event in events if event["ph"] == "X")
    assert (drawn_fault["name"], drawn_fault["tid"]) == ("kill", tracks["score"])
    assert (drawn_fault["ts"], drawn_fault["dur"]) == (12e6, 1e6)  # microseconds
    instants = [(event["tid"], event["ts"], event["name"]) for event in events if event["ph"] == "i"]
    assert instants == [(tracks[role], at * 1e6, text) for at, role, text in replayed.events]


def test_simulate_command_exits_with_1_at_a_violation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "failing.json"
    assert simulate(count=1, seed=0, shape=["plain"], save=file).exit_code == 0
    assert not file.exists()
    forget_finished(monkeypatch)
    trace_file = tmp_path / "trace.json"
    report = simulate(count=40, seed=0, shape=["plain"], save=file, perfetto=trace_file)
    assert (report.exit_code, "VIOLATED" in report.text()) == (1, True)
    assert re.search(r"the last 20 events:\n +[\d.]+ s  \w", report.text())
    assert json.loads(trace_file.read_text())["traceEvents"]
    assert simulate(replay=file).exit_code == 1


def test_interrupted_exploration_reports_what_it_played(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(
        simulate_module, "ProgressPrinter", partial(ProgressPrinter, print_line=lines.put, every_s=0.01)
    )

    def interrupted(seeds: range, shapes: list[str]) -> Iterator[SimulatedHistory]:
        yield play(draw_history(0, ["plain"]))
        while not lines.get(timeout=30).startswith("plays histories: 1 of 5 ("):
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate_module, "explore", interrupted)
    report = simulate(count=5)
    assert (report.exit_code, report.data["histories"]) == (130, 1)
    assert re.match("1 histories, .*: interrupted, and no invariant was violated$", report.text())


def test_simulate_command_stops_at_a_second_with_the_state(tmp_path: Path) -> None:
    file = tmp_path / "clean.json"
    report = simulate(seed=0, shape=["plain"], until=9.0, save=file)
    text = report.text()
    assert report.exit_code == 0
    assert max(at for at, _, _ in report.data["events"]) <= 9.0
    assert re.search(r"simulated\.score\.0: start 1, commit \d+; reads on from .*trajectories:0 \d+", text)
    assert re.search(r"versions: \d, the newest is (\d\.\d|None)", text)
    assert re.search(r"outstanding: \d+ p\d", text)
    assert simulate(replay=file, until=9.0).text() == text
    with pytest.raises(typer.BadParameter, match="plays many histories"):
        simulate(count=3, replay=file)


def test_simulate_command_steps_through_a_history(capsys: pytest.CaptureFixture[str]) -> None:
    report = simulate(seed=0, shape=["plain"], until=9.0, step=4.0)
    text = f"{capsys.readouterr().out}{report.text()}"
    assert len(re.findall("^not settled: ", text, re.MULTILINE)) == 3  # at 4, 8 and 9 s
    whole = [line for line in simulate(seed=0, shape=["plain"], until=9.0).text().splitlines() if " s  " in line]
    assert [line.split() for line in text.splitlines() if " s  " in line] == [line.split() for line in whole]
    with pytest.raises(typer.BadParameter, match="it prints text"):
        simulate(step=1.0, json=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shape": "triangle"}, "no shape 'triangle'"),
        ({"faults": [{"at": 1}]}, "not a fault"),
        ({"faults": [{"at": 1, "kind": "flood", "role": "score", "seconds": 1, "number": 0}]}, "no fault 'flood'"),
        ({"faults": [{"at": 1, "kind": "kill", "role": "nobody", "seconds": 1, "number": 0}]}, "no role 'nobody'"),
        ({"seed": "x"}, "not a history"),
        ({"seed": float("inf")}, "not a history"),
        ({"more": json.loads("[" * 100 + "]" * 100)}, "nested more than 64 deep"),
        ({"faults": [{"at": "1", "kind": "kill", "role": "score", "seconds": 1, "number": 0}]}, "at of a fault must"),
        ({"faults": [{"at": 1, "kind": "kill", "role": "score", "seconds": 1e9, "number": 0}]}, "seconds of a fault"),
        ({"faults": [{"at": 1, "kind": "kill", "role": "score", "seconds": float("nan"), "number": 0}]}, "seconds of"),
    ],
)
def test_read_history_names_what_is_wrong(tmp_path: Path, change: dict, reason: str) -> None:
    file = tmp_path / "history.json"
    file.write_text(json.dumps({**to_json(draw_history(0, ["plain"])), **change}))
    with pytest.raises(ValueError, match=reason):
        read_history(file)
