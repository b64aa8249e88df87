"""Each process of a run is killed: it is restarted, and no trajectory is lost or trained twice.

The kills do not change the weights either: an undisturbed replay of the batches gives the same bits.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
from pathlib import Path

import psutil
import pytest
from kills import ALL, ROLES, ZYGOTE, kill, rounds
from laminar_runs import Command, CommandServer, LaminarRun, StartRun
from small_runs import LENGTH_REWARD
from stops import stop_cleanly

from infra.kafka.broker import Broker, BrokerConfig, start_broker
from infra.kafka.properties import ClientProperties
from infra.kafka.topic_reader import read_topic
from infra.processes import is_running
from operators.trainer.replay import folder_digest
from schemas.records import LevelReply, LevelRequest
from schemas.topics import CURRICULUM, PROMPTS

STEPS = 28
"""Enough for all levels; the kills happen in the first few."""
LEVELS = (
    "prompts.levels=[{max_terms=3}, {min_terms=4}, {max_terms=3}, {min_terms=4}]",
    "placement.prompt_lead=8",
    "experience.sampler={name='curriculum', options={harder_above=0.01, easier_below=0, least=64}}",
)
"""Sums of three and four terms alternately; the next level follows after 64 answers, since all have a reward."""


def test_run_restarts_a_killed_warm_start(start_run: StartRun, broker: Broker, run_id: str) -> None:
    servers = f"kafka.bootstrap_servers={broker.bootstrap_servers}"
    run = start_run(run_id, servers, "model.path=''", "warm_start={steps = 100000}")
    progress = run.folder / "warm_start.json"
    run.until(progress.exists, 60, "the warm start")
    kill(run, "warm-start")
    written_at = progress.stat().st_mtime_ns
    run.until(lambda: progress.stat().st_mtime_ns != written_at, 60, "the warm start again")
    stop_cleanly(run, signal.SIGINT)


@pytest.mark.timeout(900)
def test_run_survives_the_kill_of_each_process(
    start_run: StartRun, command_server: CommandServer, run_id: str, model_folder: Path
) -> None:
    run = start_run(run_id, f"trainer.optimizer_steps={STEPS}", "trainer.checkpoint_every=5", LENGTH_REWARD, *LEVELS)
    run.until_phase("training")
    for name in itertools.islice(rounds(seed=1), len(ALL)):
        with_it = [psutil.Process(pid) for pid in run.role_pids()] if name == ZYGOTE else []
        kill(run, name)
        assert not any(is_running(process) for process in with_it)
    assert run.wait(600) == 0, run.output()
    audit = run.audit()
    assert audit["passed"]
    assert (audit["lost"], audit["trained_twice"], audit["without_reason"], audit["failed"]) == (0, 0, 0, 0)
    assert audit["trained"] == STEPS * 16
    restarts = {name: role["restarts"] for name, role in run.state()["roles"].items()}
    assert all(restarts[role] >= 2 for role in ROLES), restarts  # its own kill and that of the zygote
    assert "the broker has died (its process is gone); restarting it" in run.output()
    assert "the zygote process was killed by SIGKILL" in run.output()
    assert not run.leftovers()
    assert re.search(r"^\[.* steps .*  curriculum level \d  ", run.output(), re.MULTILINE)
    assert re.search(r"^  curriculum level +\d → 3 \(from 0\); rewards of several levels", run.output(), re.MULTILINE)
    assert_levels_follow_requests(run)
    arguments = ("train", "replay", run.name, "--folder", str(run.folder.parent), "--json")
    replay = Command(command_server, run.here / "replay", *arguments)
    assert replay.wait(150) == 0, replay.output()
    replayed = json.loads(replay.output().partition("{")[1] + replay.output().partition("{")[2])
    assert (replayed["steps"], replayed["weights"]) == (STEPS, replayed["run_weights"])
    assert replayed["weights"] != folder_digest(model_folder)


def assert_levels_follow_requests(run: LaminarRun) -> None:
    """Check the level requests and replies, and that every prompt is of its level."""
    with start_broker(BrokerConfig(run.folder / "kafka")) as broker:
        topics = [topic.name(run.name) for topic in (CURRICULUM, PROMPTS)]
        client = ClientProperties.at(broker.bootstrap_servers)
        curriculum, prompts = ([row for record in read_topic(client, topic) for row in record.rows] for topic in topics)
    requests = [row for row in curriculum if isinstance(row, LevelRequest)]
    replies = [row for row in curriculum if isinstance(row, LevelReply)]
    assert [row.level for row in requests] == [row.level for row in replies] == [1, 2, 3]
    assert all(row.answered >= 64 for row in requests)
    firsts = [0, *(row.first_prompt for row in replies), len(prompts)]
    assert [prompt.number for prompt in prompts] == list(range(len(prompts)))
    for level, (first, last) in enumerate(itertools.pairwise(firsts)):
        questions = [json.loads(prompt.reference)["question"] for prompt in prompts[first:last]]
        assert {len(re.findall(r" [+-] ", question)) for question in questions} == {2 + level % 2}
