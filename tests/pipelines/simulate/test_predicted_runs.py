"""Predicted runs: real placement and replicas in virtual time, with counted tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from predicted_clusters import small_cluster, with_schedule

from operators.trainer.emulation import TrainerEmulation
from pipelines.simulate.prediction.cluster import Cluster, Overheads
from pipelines.simulate.prediction.measurement import Measurement, Prediction
from pipelines.simulate.prediction.world import PredictedWorld

ROOT = Path(__file__).parents[3]
SCHEDULES = ("synchronous", "one_step", "stream", "partial_rollout", "laminar")


@pytest.fixture(scope="module")
def worlds() -> dict[str, tuple[PredictedWorld, Measurement, Prediction]]:
    """One run of each schedule."""
    found = {}
    for schedule in SCHEDULES:
        world = PredictedWorld(with_schedule(schedule))
        measurement = world.run()
        found[schedule] = world, measurement, measurement.prediction()
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_prediction_trains_whole_batches_to_the_goal(worlds: dict, schedule: str) -> None:
    _, measurement, found = worlds[schedule]
    assert [step.trajectories for step in measurement.steps] == [32] * 6
    assert all(later.begins >= earlier.ends for earlier, later in pairwise(measurement.steps))
    assert 0 < found.kv_use <= 1
    assert all(0 <= share <= 1 for share in (found.trainer_idle, found.rollout_idle, found.bubbles))


def test_prediction_orders_the_schedules_by_their_overlap(worlds: dict) -> None:
    rates = {name: found.trained_tokens_per_s for name, (_, _, found) in worlds.items()}
    assert rates["synchronous"] < min(rates["one_step"], rates["stream"])
    assert max(rates["one_step"], rates["stream"]) < rates["laminar"]


def test_prediction_keeps_the_staleness_of_each_schedule(worlds: dict) -> None:
    worst = {name: found.staleness_max for name, (_, _, found) in worlds.items()}
    assert worst["synchronous"] == 0
    assert [set(step.staleness) for step in worlds["one_step"][1].steps] == [{0}, *5 * [{1}]]
    assert 1 <= worst["laminar"] <= 3


def test_prediction_is_the_same_for_the_same_seed(worlds: dict) -> None:
    world = PredictedWorld(with_schedule("laminar"))
    assert world.run().prediction() == worlds["laminar"][2]
    assert world.scheduler.now == worlds["laminar"][0].scheduler.now


def test_prediction_is_the_same_in_every_process(worlds: dict) -> None:
    code = (
        "from predicted_clusters import with_schedule; from pipelines.simulate.prediction.search import predict; "
        "print(predict(with_schedule('laminar')))"
    )
    paths = os.pathsep.join(map(str, (ROOT, Path(__file__).parent)))
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": paths}
    other = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert other.stdout.strip() == str(worlds["laminar"][2])


def test_prediction_moves_trajectories_with_their_kv(worlds: dict) -> None:
    world, _, found = worlds["laminar"]
    assert found.moved > 0
    assert sum(each.replica.kv.reused for each in world.replicas.values()) > 0
    assert sum(each.replica.kv.recomputed for each in world.replicas.values()) == 0


def test_prediction_shows_how_kv_fills_and_empties() -> None:
    cluster = small_cluster(rollout__heartbeat_s=0.2)
    measurement = Measurement(cluster)
    assert measurement.kv_cycle() == ()
    measurement = PredictedWorld(cluster).run()
    cycle = measurement.kv_cycle(5)
    assert max(cycle[:-1]) > cycle[-1]
    beats = [beat for beats in measurement.beats.values() for beat in beats]
    assert {beat.version for beat in beats} <= {None, *range(7)}


def test_prediction_waits_for_tools(worlds: dict) -> None:
    """On average 2.5 calls of at least 20 s, which all replicas overlap with other work."""
    tools = {"lengths": {"p50": 200, "p99": 1000}, "tools": {"most_calls": 4, "p50_s": 20.0, "p99_s": 30.0}}
    found = PredictedWorld(small_cluster(rollout__emulation=tools)).run().prediction()
    plain = worlds["laminar"][2]
    assert found.latency_s > plain.latency_s + 30.0
    assert found.trained_tokens_per_s < plain.trained_tokens_per_s


def test_prediction_costs_no_more_events_for_longer_responses() -> None:
    def events(factor: int) -> int:
        lengths = {"p50": 100 * factor, "p99": 500 * factor}
        world = PredictedWorld(
            small_cluster(
                prompts__max_new_tokens=500 * factor,
                rollout__context=1024 * factor,
                rollout__kv_capacity=8192 * factor,
                rollout__heartbeat_s=1.0 * factor,
                placement__heartbeat_timeout_s=10.0 * factor,
                rollout__progress_tokens=10**6,
                rollout__progress_s=1e6,
                rollout__emulation={"lengths": lengths},
                trainer__optimizer_steps=4,
            )
        )
        world.run()
        return world.scheduler.planned

    assert events(8) < 1.5 * events(1)


def test_prediction_recovers_the_work_of_a_killed_replica() -> None:
    world = PredictedWorld(small_cluster(placement__heartbeat_timeout_s=3.0))
    world.scheduler.at(5.0, lambda: world.kill(0, restart_s=8.0))
    found = world.run()
    assert [step.trajectories for step in found.steps] == [32] * 6
    assert found.moves["resume"] + found.moves["failover"] > 0
    assert world.replicas[0].replica.incarnation == 2


def test_prediction_of_a_slower_trainer_is_slower(worlds: dict) -> None:
    emulation = {"step_s": [[0, 1.0], [1e4, 40.0]]}
    found = PredictedWorld(small_cluster(trainer__emulation=emulation)).run().prediction()
    assert found.trained_tokens_per_s < worlds["laminar"][2].trained_tokens_per_s / 2
    assert found.trainer_idle < 0.05 < found.rollout_idle
    rate = 1e4 / TrainerEmulation(((0, 1.0), (1e4, 40.0))).seconds(1e4)
    assert found.trained_tokens_per_s == pytest.approx(rate, rel=0.1)


def test_prediction_ends_for_a_run_that_cannot_make_progress() -> None:
    world = PredictedWorld(small_cluster(prompts__prompt_tokens=1024, rollout__context=1024))
    with pytest.raises(ValueError, match="no batch was trained"):
        world.run()


@pytest.mark.parametrize("changes", [{"train_gpus": 0}, {"gpus_per_replica": 0}, {"training_parts": 0}])
def test_cluster_rejects_impossible_numbers(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(changes))} must be at least 1, not 0"):
        Cluster(small_cluster().config, **changes)  # type: ignore[arg-type]


def test_overheads_reject_negative_seconds() -> None:
    with pytest.raises(ValueError, match="hop_s must be at least 0, not -1"):
        Overheads(hop_s=-1)
