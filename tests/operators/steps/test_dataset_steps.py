"""export and imports: experiences in, files out; the files in, experiences of another run out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from record_factories import CLIENT, experience, prompt, trajectory
from role_graph import RoleGraph

from operators.export.config import Contents, ExportConfig
from schemas.block import Block
from schemas.topics import EXPERIENCES, METRICS

Graph = Callable[..., RoleGraph]


@pytest.fixture
def exported(graph: Graph, tmp_path: Path) -> Path:
    folder = tmp_path / "dataset"
    rows = Block.of([experience(trajectory(prompt(4), member)) for member in range(2)])
    role = graph("export", ExportConfig(folder, Contents("run", "experiences", starts={0: 0})), CLIENT, 60.0)
    assert role.fold("collect rows and write files", [(EXPERIENCES, rows)], [], last=True) == []
    return folder


def test_collect_rows_and_write_files_exports_each_row(exported: Path) -> None:
    (file,) = exported.glob("**/*.parquet")
    assert pq.read_table(file).num_rows == 2


def test_import_rows_writes_the_exported_rows_with_new_numbers(graph: Graph, exported: Path) -> None:
    outputs = graph("imports", exported, "other", CLIENT, 2, 60.0).fold("import rows", [], [])
    experiences = [row for output in outputs if output.topic is EXPERIENCES for row in output.record.records()]
    assert [each.trajectory.trajectory_id for each in experiences] == ["i0.0", "i0.1"]
    (metric,) = [output.record for output in outputs if output.topic is METRICS]
    assert metric.values == {"trajectories": 2.0, "groups": 1.0, "first": 0.0}
