"""The split of devices by the work of trainer and rollouts, and the configurations in which it is possible."""

from __future__ import annotations

from typing import Any

import pytest

from operators.autoscaler.split import SideWork, best_split, changed_split, measured_work
from pipelines.config import Config, ConfigError, parse_config


@pytest.mark.parametrize(("trainer", "rollouts", "best"), [(100, 100, 4), (300, 100, 6), (100, 700, 1), (1000, 1, 7)])
def test_split_gives_each_side_the_share_of_its_work(trainer: float, rollouts: float, best: int) -> None:
    assert best_split(SideWork(trainer, rollouts, 1.0), 8, range(1, 8)) == best


def test_split_is_one_of_the_choices() -> None:
    assert best_split(SideWork(1000, 1, 1.0), 8, range(2, 6)) == 5


def test_split_changes_only_for_a_gain() -> None:
    assert changed_split(SideWork(100, 100, 50.0), 2, 8, range(1, 8)) == 4  # 25 s instead of 50
    assert changed_split(SideWork(100, 100, 26.0), 5, 8, range(1, 8)) == 5  # 25 s instead of 26


@pytest.mark.parametrize(
    ("idle", "use", "rollouts"), [(0.5, 0.1, 40.0), (0.0, 0.45, 20.0), (0.0, 0.95, 40.0), (0.04, None, 40.0)]
)
def test_rollouts_have_room_while_the_trainer_never_waits(idle: float, use: float | None, rollouts: float) -> None:
    assert measured_work(3, 4, 10.0, idle, use) == SideWork(
        pytest.approx(30 * (1 - idle)), pytest.approx(rollouts), 10.0
    )


def parse(scaling: dict[str, Any], trainer: dict[str, Any] | None = None, **sections: Any) -> Config:
    table = {"batch_shares": 3, **(trainer or {})}
    return parse_config({"autoscaling": {"devices": 4, **scaling}, "trainer": table, **sections}, "my.toml")


def test_split_is_configured_with_the_shares_of_the_most_ranks() -> None:
    config = parse({"policy": "split", "minimum": 1})
    assert config.autoscaling is not None
    assert config.autoscaling.most(1, 8) == 3
    assert parse({"minimum": 2}, {"batch_shares": 2}, rollout={"processes": 2}).trainer.shares == 2
    gpus = {"device": "cuda", "gpus": [0, 1, 2, 3]}
    assert parse({}, gpus, rollout={"gpus": [3, 2, 1, 0]}).rollout.gpus_of(0, "abcd") == ("d",)


@pytest.mark.parametrize(
    ("scaling", "trainer", "rollout", "says"),
    [
        ({"actuator": "kubernetes"}, {}, {}, "devices needs actuator = 'local', not 'kubernetes'"),
        ({"policy": "split", "minimum": 0}, {}, {}, "minimum must be at least 1 for policy 'split', not 0"),
        ({"minimum": 4}, {}, {}, "minimum must be below devices = 4, not 4"),
        ({"maximum": 5}, {}, {}, "maximum must be below devices = 4, not 5"),
        ({"policy": "split", "devices": 0}, {}, {}, "policy = 'split' needs autoscaling.devices"),
        ({}, {"batch_shares": 2}, {}, "up to 3 ranks: set trainer.batch_shares = 3 or more"),
        ({"minimum": 2}, {"batch_shares": 2}, {"processes": 1}, "up to 3 ranks: set trainer.batch_shares = 3 or more"),
        ({}, {"shard_ranks": 1}, {}, "needs trainer.shard_ranks = 0, not 1"),
        ({}, {"learner": {"share_device": True}}, {}, "needs trainer.learner.share_device = False"),
        ({}, {}, {"engine": "emulated"}, "needs a trainer with ranks, not rollout.engine = 'emulated'"),
        ({}, {}, {"processes": 4}, "rollout.processes is 4, but autoscaling.devices = 4"),
        ({}, {"device": "cuda"}, {}, "such as [0, 1, 2, 3], and the same from the last"),
        ({}, {"device": "cuda", "gpus": [0, 1, 2, 3]}, {"gpus": [0, 1, 2, 3]}, "from the last to the first"),
    ],
)
def test_split_that_is_impossible_is_refused(
    scaling: dict[str, Any], trainer: dict[str, Any], rollout: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(scaling, trainer, rollout=rollout)
    assert says in "\n".join([str(refused.value), *getattr(refused.value, "detail_lines", ())])
