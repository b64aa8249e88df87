"""import: writes an exported dataset to a run as experiences with new ids. It consumes no topic."""

from __future__ import annotations

import apache_beam as beam

from infra.kafka.properties import ClientProperties
from infra.storage import StorageFolder
from operators.export.import_rows import ImportRows
from operators.io.config import ShardConfig
from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally


def build(
    pipeline: beam.Pipeline,
    folder: StorageFolder,
    run: str,
    client: ClientProperties,
    partitions: int,
    transaction_timeout_s: float,
) -> None:
    """Reads the dataset in `folder`; produces experiences and, at its end, metrics."""
    source = ShardConfig(client, run, "import", bounded=True, transaction_timeout_s=transaction_timeout_s)
    (
        pipeline
        | "poll" >> ReadTopics(source)
        | "import rows" >> FoldRecords(ImportRows(folder, partitions), "read rows", "number and convert rows")
        | "write experiences" >> WriteTransactionally(source)
    )
