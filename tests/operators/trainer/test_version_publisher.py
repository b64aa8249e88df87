"""Failures while the trainer publishes are retried, whichever call reports them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from record_factories import manifest

from infra.store.publisher import PublishFailed
from operators.trainer.rendezvous import Rendezvous
from operators.trainer.version_publisher import VersionPublisher
from schemas.records import PolicyVersion


def test_failed_publish_that_a_restore_reports_is_retried() -> None:
    def fail(*_: object) -> None:
        raise PublishFailed("version 2.0 was not published: the log is not available")

    publishing: Any = SimpleNamespace(publisher=None, restore_version=fail)
    training: Any = SimpleNamespace(joint=None, rendezvous=Rendezvous())
    versions = VersionPublisher(publishing, training)
    versions.resumed = resumed = manifest(PolicyVersion(1, 0))
    versions.restore_resumed()
    assert versions.resumed is resumed
    assert versions.behind
