"""The shards of a run's roles change only if this release can read the run."""

from __future__ import annotations

import pytest

from infra.kafka.clients import SessionClients
from pipelines.config import Config, ConfigDraft, KafkaConfig, RunConfig
from pipelines.layouts import RoleLayout
from pipelines.roles import ALL_SHARDS, submitted_process
from pipelines.run import resharding
from pipelines.run.submission import guard
from schemas.release import NewerRelease


@pytest.mark.parametrize("newer", [False, True])
def test_run_of_a_newer_release_is_not_resharded(newer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change writes the notes of all shards again, without what it does not know."""
    changed: list[int] = []

    def apply(layout: RoleLayout, clients: SessionClients) -> int:
        changed.append(layout.shards)
        return 1

    def use_release(*_: object) -> None:
        if newer:
            raise NewerRelease("install 9.9.9")

    monkeypatch.setattr(RoleLayout, "apply", apply)
    monkeypatch.setattr(resharding, "use_release", use_release)
    config = Config(run=RunConfig(name="first"), kafka=KafkaConfig(bootstrap_servers="127.0.0.1:9", partitions=2))
    if newer:
        with pytest.raises(NewerRelease):
            resharding.reshard_role(config, "score", print)
    else:
        resharding.reshard_role(config, "score", print)
    assert changed == ([] if newer else [config.score.shards])


@pytest.mark.parametrize(("index", "expected"), [(0, ["score"]), (ALL_SHARDS, ["score"]), (1, [])])
def test_first_shard_changes_the_number_of_shards(
    index: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pods of a StatefulSet start one shard each; one of them must change the layout."""
    changed: list[str] = []
    monkeypatch.setattr(guard, "reshard_role", lambda _config, role, _note: changed.append(role))
    monkeypatch.setattr(guard, "role_problems", lambda *_: [])
    for name in ("wait_for_brokers", "check_kafka", "make_topics", "refuse_new_role"):
        monkeypatch.setattr(guard, name, lambda *_, **__: None)
    config = Config(run=RunConfig(name="first"), kafka=KafkaConfig(bootstrap_servers="127.0.0.1:9", partitions=2))
    guard.prepare(ConfigDraft(config), submitted_process(config, "score", index), print)
    assert changed == expected
