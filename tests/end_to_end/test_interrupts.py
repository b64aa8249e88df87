"""However and whenever a run is ended, it is gone within seconds and has said so."""

from __future__ import annotations

import random
import re
import signal
import time

import pytest
from conftest import StartRun
from stops import GONE_WITHIN_S, stop, stop_at_a_random_moment, stop_cleanly

from infra.kafka.broker import Broker, BrokerConfig, start_broker

STEPS = 30
"""Of a run that reaches its goal, though killed twice on the way."""


@pytest.mark.parametrize("phase", ["starting", "training", "final evaluation", "draining"])
def test_ctrl_c_stops_a_run_in_every_phase(phase: str, start_run: StartRun, broker: Broker, run_id: str) -> None:
    run = start_run(
        run_id,
        f"kafka.bootstrap_servers={broker.bootstrap_servers}",
        f"trainer.optimizer_steps={2000 if phase == 'training' else 2}",
    )
    run.until_phase(phase)
    stop_cleanly(run, signal.SIGINT)


@pytest.mark.parametrize(("phase", "left_in"), [("audit", {"stopped", "ended"}), ("ended", {"ended"})])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_after_the_drain_leaves_consistent_files(
    number: int, phase: str, left_in: set[str], start_run: StartRun, broker: Broker, run_id: str
) -> None:
    run = start_run(run_id, f"kafka.bootstrap_servers={broker.bootstrap_servers}", "trainer.optimizer_steps=2")
    run.until_phase(phase)  # "ended": its report is still to be written
    assert stop(run, number) in left_in


def test_ctrl_c_stops_a_run_with_a_starting_broker(start_run: StartRun, run_id: str) -> None:
    run = start_run(run_id)
    run.until((run.folder / "kafka" / "server.properties").exists, 60, "a broker's start")
    stop_cleanly(run, signal.SIGINT)


def test_ctrl_c_stops_a_warm_start(start_run: StartRun, broker: Broker, run_id: str) -> None:
    servers = f"kafka.bootstrap_servers={broker.bootstrap_servers}"
    run = start_run(run_id, servers, "model.path=''", "warm_start={steps = 100000}")
    run.until((run.folder / "warm_start.json").exists, 60, "the warm start")
    stop_cleanly(run, signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_stop_signals_stop_a_run(number: int, start_run: StartRun, broker: Broker, run_id: str) -> None:
    run = start_run(run_id, f"kafka.bootstrap_servers={broker.bootstrap_servers}")
    run.until_phase("starting")
    stop_cleanly(run, number)


def test_ctrl_c_stops_a_run_at_a_random_time(start_run: StartRun, run_id: str) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    stop_at_a_random_moment(start_run(run_id), seed)


def test_ctrl_c_stops_a_run_without_kafka(
    start_run: StartRun, run_id: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with start_broker(BrokerConfig(tmp_path_factory.mktemp("kafka"))) as gone:
        run = start_run(run_id, f"kafka.bootstrap_servers={gone.bootstrap_servers}", "trainer.optimizer_steps=2000")
        run.until_phase("training")
        gone.kill()
        time.sleep(1)
        stop_cleanly(run, signal.SIGINT)


def test_run_fails_after_a_long_kafka_outage(
    start_run: StartRun, run_id: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with start_broker(BrokerConfig(tmp_path_factory.mktemp("kafka"))) as gone:
        servers = gone.bootstrap_servers
        run = start_run(
            run_id, f"kafka.bootstrap_servers={servers}", "kafka.outage_timeout_s=3", "trainer.optimizer_steps=2000"
        )
        run.until_phase("training")
        gone.kill()
        assert run.wait(60) == 1
    assert re.search(
        rf"^laminar: Kafka at {servers} has not answered for \d+ s: .*Connection refused", run.said(), re.M
    )
    assert f"Kafka at {servers} does not answer: " in run.said()
    assert run.state()["phase"] == "failed"
    run.seconds_until_gone(1.0)


def test_killed_run_cleans_up_and_resumes(start_run: StartRun, run_id: str) -> None:
    run = start_run(run_id, f"trainer.optimizer_steps={STEPS}")
    run.until(run.checkpoints, 90, "a checkpoint")
    assert len(run.processes()) >= 11  # the run, its zygote, its broker, eight roles
    run.signal(signal.SIGKILL)
    run.seconds_until_gone(GONE_WITHIN_S)
    assert run.wait() == -signal.SIGKILL
    began = run.state()["started_at"]
    run.resume()
    run.until(run.weights, 60, "its weights")
    run.end()  # and now everything at once, so that nobody cleans up
    assert run.wait() == -signal.SIGKILL
    assert run.weights()
    run.resume()
    assert run.wait() == 0, run.said()
    audit = run.audit()
    assert (audit["passed"], audit["trained"], audit["lost"]) == (True, STEPS * 16, 0)
    assert (run.state()["started_at"], run.state()["phase"]) == (began, "ended")
    assert not run.traces()
