"""The policies: what one observation asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from operators.autoscaler.config import AutoscalingConfig
from operators.autoscaler.observation import Observation
from operators.autoscaler.policies import ScalingRequest, make_policy
from pipelines.config import ConfigError, parse_config

PRICES = ({"price": 1.0, "processes": 4}, {"price": 0.5, "processes": 8})
TIMES = ({"at": "20:00", "processes": 8}, {"at": "08:00", "processes": 2})


def requested(
    policy: str, running: int = 4, *, options: dict[str, Any] | None = None, **measured: Any
) -> ScalingRequest | None:
    from pydantic import TypeAdapter

    table = {"policy": policy, **(options or {})}
    config = TypeAdapter(AutoscalingConfig).validate_python(table)
    return make_policy(config).request(Observation(0.0, running, **measured))


@pytest.mark.parametrize(
    ("policy", "options", "measured", "expected"),
    [
        ("trainer_idle", {}, {"trainer_idle": 0.5}, ("more", 7)),
        ("trainer_idle", {}, {"trainer_idle": 1.0}, ("more", 35)),
        ("trainer_idle", {}, {"trainer_idle": 0.2}, ("keep", 0)),
        ("trainer_idle", {}, {"trainer_idle": 0.0, "rollout_idle": 0.6}, ("fewer", 2)),
        ("trainer_idle", {}, {"trainer_idle": 0.0, "rollout_idle": 0.2}, ("fewer", 4)),
        ("trainer_idle", {}, {"trainer_idle": 0.0}, ("keep", 0)),
        ("trainer_idle", {"low": 0.0, "high": 0.6}, {"trainer_idle": 0.5}, ("keep", 0)),
        ("staleness", {}, {"staleness": 3.0}, ("fewer", 1)),
        ("staleness", {}, {"staleness": 0.0}, ("more", 8)),
        ("staleness", {}, {"staleness": 0.45}, ("more", 8)),
        ("staleness", {"low": 0.9}, {"staleness": 0.8}, ("more", 6)),
        ("staleness", {}, {"staleness": 1.0}, ("keep", 0)),
        ("queue", {}, {"slots": 40, "requests": 40, "waiting": 20}, ("more", 8)),
        ("queue", {}, {"slots": 40, "requests": 10}, ("fewer", 2)),
        ("queue", {}, {"slots": 40, "requests": 30}, ("keep", 0)),
        ("queue", {}, {"slots": 40, "requests": 40}, ("keep", 0)),
        ("split", {"devices": 8}, {"slots": 40, "requests": 40, "trainer_idle": 0.5}, ("exactly", 5)),
        ("split", {"devices": 8}, {"slots": 40, "requests": 9, "trainer_idle": 0.0}, ("exactly", 2)),
        ("split", {"devices": 8, "minimum": 3}, {"slots": 40, "requests": 9, "trainer_idle": 0.0}, ("exactly", 3)),
        ("split", {"devices": 8}, {"slots": 40, "requests": 40, "trainer_idle": 0.04}, ("exactly", 4)),
        ("price", {"prices": PRICES, "price_file": "p"}, {"price": 0.5}, ("exactly", 8)),
        ("price", {"prices": PRICES, "price_file": "p"}, {"price": 0.6}, ("exactly", 4)),
        ("price", {"prices": PRICES, "price_file": "p", "minimum": 0}, {"price": 1.1}, ("exactly", 0)),
        ("schedule", {"schedule": TIMES}, {"time_of_day": 8 * 3600}, ("exactly", 2)),
        ("schedule", {"schedule": TIMES}, {"time_of_day": 8 * 3600 - 1}, ("exactly", 8)),
        ("schedule", {"schedule": TIMES}, {"time_of_day": 23 * 3600}, ("exactly", 8)),
    ],
)
def test_policy_requests_processes(
    policy: str, options: dict[str, Any], measured: dict[str, Any], expected: tuple[str, int]
) -> None:
    found = requested(policy, options=options, **measured)
    assert found is not None
    assert (found.kind, found.processes) == expected
    assert found.reason


@pytest.mark.parametrize("policy", ["trainer_idle", "staleness", "queue"])
def test_policy_requests_nothing_without_its_measurement(policy: str) -> None:
    assert requested(policy) is None


def test_price_policy_requests_nothing_without_a_price() -> None:
    assert requested("price", options={"prices": PRICES, "price_file": "p"}) is None


@pytest.mark.parametrize(("kind", "target"), [("exactly", 3), ("more", 5), ("fewer", 3), ("keep", 5)])
def test_request_for_more_never_lowers_the_target_nor_vice_versa(kind: Any, target: int) -> None:
    assert ScalingRequest(kind, 3, "").target(5) == target


def test_policy_may_be_a_class_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from operators.autoscaler.policies import Policy, ScalingRequest\n"
        "class Half(Policy):\n"
        "    def __init__(self, share=0.5):\n"
        "        self.share = share\n"
        "    def request(self, seen):\n"
        "        return ScalingRequest('exactly', int(seen.slots * self.share), 'half of the slots')\n"
    )
    found = requested(f"{file}:Half", options={"options": {"share": 0.25}}, slots=8)
    assert found == ("exactly", 2, "half of the slots")
    with pytest.raises(ValueError, match="unexpected keyword argument 'part'"):
        requested(f"{file}:Half", options={"options": {"part": 1}})
    with pytest.raises(ValueError, match=r"must be a class that derives from operators\.autoscaler\.policies\.Policy"):
        requested(f"{file}:Other")
    with pytest.raises(ValueError, match="cannot be loaded: there is no file"):
        requested(f"{tmp_path}/none.py:Half")


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"policy": "trainer_idel"}, "did you mean 'trainer_idle'"),
        ({"minimum": 0}, "minimum must be at least 1 for policy 'trainer_idle', not 0"),
        ({"minimum": 3, "maximum": 2}, "at least minimum = 3, not 2"),
        ({"low": 0.5}, "not 0.5 and 0.2"),
        ({"policy": "price"}, "needs autoscaling.prices and autoscaling.price_file"),
        ({"policy": "schedule"}, "needs autoscaling.schedule"),
        ({"policy": "schedule", "schedule": ({"at": "8:00", "processes": 1},)}, "as 08:00, not '8:00'"),
        ({"policy": "schedule", "schedule": TIMES, "high": 1.0}, "not for policy 'schedule'"),
        ({"stable_s": 60.0, "cooldown_s": 30.0}, "cooldown_s must be at least stable_s = 60.0, not 30.0"),
        ({"observe_s": 0.0}, "observe_s must be positive, not 0.0"),
        ({"max_step": 0}, "max_step must be at least 1"),
        ({"actuator": "command"}, "needs autoscaling.command"),
        ({"options": {"a": 1}}, "options are for a policy of your own"),
    ],
)
def test_autoscaling_config_names_the_invalid_key(table: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_config({"autoscaling": table}, "test")
