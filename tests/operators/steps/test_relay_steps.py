"""relay: manifests in, dead letters out; what it holds is in its heartbeats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from record_factories import manifest, version
from role_graph import RoleGraph

from infra.store.weight_store import WeightStore
from schemas.topics import DEAD_LETTERS, RELAY


def test_serve_weights_rejects_a_manifest_of_other_bytes(graph: Callable[..., RoleGraph]) -> None:
    role = graph("relay")
    folder = Path(role.transforms["serve weights"].step.config.store)
    with WeightStore(folder) as store:
        incoming = store.begin(version(3), 7)
        incoming.view[:] = b"weights"
        incoming.seal()
    outputs = role.fold("serve weights", [(RELAY, manifest(version(3), (2,), version(2), bytes=9))], [])
    (letter,) = [each.record for each in outputs if each.topic is DEAD_LETTERS]
    assert (letter.topic, letter.offset) == ("relay", 0)
    assert "the manifest of version 1.3 declares file '' but the store has '1.3.safetensors'" in letter.reason
