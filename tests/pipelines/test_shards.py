"""The configuration of a shard: the user's time limits reach every role."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infra.runners.liveness import StepBudget
from pipelines.config import Config, KafkaConfig, RunConfig
from pipelines.progress_config import ProgressConfig
from pipelines.roles import ALL_PIPELINES
from pipelines.shards import shard_config


@pytest.mark.parametrize("role", ALL_PIPELINES)
def test_shard_has_the_time_limits_of_the_configuration(role: str) -> None:
    config = replace(
        Config(),
        run=RunConfig("first"),
        kafka=KafkaConfig("localhost:1", transaction_timeout_s=90.0),
        progress=replace(ProgressConfig(restore_s=11.0, stalled="report"), **{f"{role}_s": 12.0}),
    )
    shard = shard_config(config, role)
    assert shard.transaction_timeout_s == shard.session().transaction_timeout_s == 90.0
    assert shard.budget == StepBudget(11.0, 12.0, f"progress.restore_s or progress.{role}_s", restart=False)
