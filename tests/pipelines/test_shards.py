"""The configuration of a shard: the user's time limits and the relays' token reach every role."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from infra.files import create_secret, read_secret
from infra.runners.liveness import StepBudget
from operators.relay.config import RelayConfig
from pipelines.config import Config, KafkaConfig, RunConfig
from pipelines.roles import ALL_PIPELINES, Role, build_role
from pipelines.run_config import ProgressConfig
from pipelines.sharded_sources import score_source
from pipelines.shards import shard_config, with_relay_token


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


def test_steps_that_only_follow_inputs_poll_rarely_while_idle() -> None:
    """Each poll that finds nothing costs half a millisecond."""
    shard = score_source(replace(Config(), kafka=KafkaConfig("localhost:1")), 0)
    assert (shard.poll_s, shard.commit_s) == (0.25, 1.0)


def test_relays_of_a_run_have_a_token_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    token = with_relay_token(Config(), folder, create=True).relay.token()
    assert len(token) == 64
    assert (folder / "relay.secret").stat().st_mode & 0o777 == 0o600
    assert with_relay_token(Config(), folder, create=True).relay.token() == token
    assert with_relay_token(Config(), tmp_path / "other", create=True).relay.token() != token
    with pytest.raises(ValueError, match=r"token_file: .*relay\.secret cannot be read"):
        with_relay_token(Config(), tmp_path / "none").relay.token()


def test_configured_token_replaces_that_of_the_run(tmp_path: Path) -> None:
    create_secret(tmp_path / "token")
    config = replace(Config(), relay=RelayConfig(token_file=str(tmp_path / "token")))
    assert with_relay_token(config, tmp_path / "first", create=True) is config
    assert not (tmp_path / "first").exists()


@pytest.mark.parametrize("role", [Role("rollout"), Role("trainer"), Role("relay")])
def test_roles_with_weights_get_the_token_of_their_run(
    role: Role, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Config] = []
    module = importlib.import_module(f"pipelines.{role.pipeline}")
    monkeypatch.setattr(module, "build", lambda pipeline, config, **index: built.append(config))
    config = replace(Config(), run=RunConfig("first", tmp_path))
    for _ in range(2):
        build_role(None, config, role)  # type: ignore[arg-type]
    tokens = {each.relay.token() for each in built}
    assert tokens == {read_secret(tmp_path / "first" / "relay.secret")}
