"""The ACLs of each Kafka user suffice for its graph: for its inputs, its sessions and the outputs of its steps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from apache_beam.pipeline import AppliedPTransform
from role_graphs import RUN, config_of_graphs, parts_of, with_all_inputs
from unrun_pipelines import unrun_pipeline

from infra.deploy.role_acls import EXPORT, IMPORT, role_acls
from infra.kafka.acls import CLUSTER_NAME, Acl
from infra.kafka.properties import ClientProperties
from operators.export.config import Contents, ExportConfig
from operators.io.config import ShardConfig
from operators.io.fold_records import FoldRecords
from operators.io.map_outputs import MapOutputs
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from pipelines import export, imports
from pipelines.roles import ALL_PIPELINES
from schemas import topics
from schemas.topics import CATALOGUE, DEAD_LETTERS, METRICS, SCHEMAS, Topic

OPERATORS = Path(__file__).parents[2] / "operators"
CLIENT = ClientProperties.at("localhost:1")
ACLS = role_acls(RUN, (*ALL_PIPELINES, IMPORT))

Need = tuple[str, str, str]
"""An operation on a resource: its kind, its name and the operation."""


def is_allowed(acls: Iterable[Acl], user: str, need: Need) -> bool:
    kind, name, operation = need
    # Read and Write include Describe.
    enough = {operation} | ({"Read", "Write"} if operation == "Describe" else set())
    return any(
        acl.user == user
        and acl.resource == kind
        and (name.startswith(acl.name) if acl.prefixed else name == acl.name)
        and enough & set(acl.operations)
        for acl in acls
    )


def needs_of_session(shard: ShardConfig) -> Iterator[Need]:
    """What a session of `shard` does by itself: it reads inputs, note, ledger, and writes to note and ledger."""
    session = shard.session()
    yield from (("topic", each.topic, "Read") for each in (*session.inputs, *session.owned))
    for place in (session.restore, *session.ledger):
        yield from (("topic", place.topic, operation) for operation in ("Read", "Write"))
    if session.heartbeats is not None:
        yield "topic", session.heartbeats.place.topic, "Read"
    yield "group", session.group, "Read"  # to commit offsets
    yield from (("transactional-id", session.group, operation) for operation in ("Describe", "Write"))


def outputs_in(*files: Path) -> set[Topic]:
    """The topics of the outputs that the code in `files` makes."""
    names = re.findall(r"\bOutput\(\s*([A-Z_]+),", "".join(each.read_text() for each in files))
    return {getattr(topics, name) for name in names}


def needs_of(parts: Iterable[AppliedPTransform], written: set[Topic]) -> set[Need]:
    """What a graph needs whose fold makes outputs for the topics `written`."""
    shards: list[ShardConfig] = []
    for part in parts:
        if isinstance(step := part.transform, MapOutputs):
            written = written | set(step.writes)
        elif isinstance(step, FoldRecords) and step.makes_dead_letters:
            written = written | {DEAD_LETTERS}
        elif isinstance(step, ReadTopics | WriteTransactionally):
            shards += step.shards
    written = written | {METRICS for shard in shards if shard.counters_s is not None}
    needs = {need for shard in shards for need in needs_of_session(shard)}
    assert needs
    return needs | {("topic", topic.name(RUN), "Write") for topic in written}


@pytest.mark.parametrize("role", ALL_PIPELINES)
def test_acls_of_a_role_suffice_for_its_graph(role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of_graphs(tmp_path, monkeypatch)
    with_all_inputs(config, role, monkeypatch)
    written = outputs_in(*(OPERATORS / role).rglob("*.py"))
    needs = needs_of(parts_of(config, role), written)
    needs |= {("topic", topic.name(RUN), "DescribeConfigs") for topic in CATALOGUE.values()}  # before it starts
    needs |= {("cluster", CLUSTER_NAME, "DescribeConfigs"), ("topic", SCHEMAS.name(RUN), "Write")}
    assert sorted(need for need in needs if not is_allowed(ACLS, role, need)) == []


def test_acls_of_exports_suffice_for_every_topic(tmp_path: Path) -> None:
    for name in CATALOGUE:
        pipeline = unrun_pipeline()
        export.build(pipeline, ExportConfig(tmp_path, Contents(RUN, name, starts={0: 0})), CLIENT, 60.0)
        written = outputs_in(OPERATORS / "export" / "export_topic.py")
        needs = needs_of(pipeline.transforms_stack[0].parts, written)
        assert sorted(need for need in needs if not is_allowed(ACLS, EXPORT, need)) == []


def test_acls_of_imports_suffice_for_their_graph(tmp_path: Path) -> None:
    pipeline = unrun_pipeline()
    imports.build(pipeline, tmp_path, RUN, CLIENT, 2, 60.0)
    needs = needs_of(pipeline.transforms_stack[0].parts, outputs_in(OPERATORS / "export" / "import_rows.py"))
    assert ("topic", topics.EXPERIENCES.name(RUN), "Write") in needs
    assert sorted(need for need in needs if not is_allowed(ACLS, IMPORT, need)) == []
