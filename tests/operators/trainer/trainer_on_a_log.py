"""The trainer as a role on an in-memory log, for tests."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from in_memory_log import Log, Shard
from record_factories import shard, topic_input
from safetensors.numpy import load_file
from trainer_batches import make_batch

from infra.kafka.note import Note
from infra.store.weight_store import WeightStore
from operators.io.coalesce import coalesce
from operators.io.elements import PartitionKey
from operators.trainer.config import LearnerConfig
from operators.trainer.train_batches import TrainBatches
from operators.trainer.training_config import TrainingConfig
from schemas.records import Metric, PolicyVersion, WeightVersion
from schemas.topics import BATCHES, METRICS, RELAY, Topic

DEADLINE = 20.0


class Producer:
    """A fake Kafka producer."""

    made: ClassVar[list[Producer]] = []

    def __init__(self, client: object) -> None:
        self.closed = False
        self.made.append(self)

    def close(self, timeout_s: float) -> None:
        self.closed = True


class Trainer:
    """The trainer on an in-memory log. Manifests wait for `gate`, then raise the next of `failures`. The buffer has
    committed `batches_made`."""

    def __init__(self, folder: Path, model: Path, **config: Any) -> None:
        self.log, self.folder = Log(), folder
        self.failures: list[Exception] = []
        self.batches_made = 0
        self.gate = threading.Event()
        self.gate.set()
        settings = {"optimizer_steps": 6, "checkpoint_every": 2, "learner": LearnerConfig(warmup_steps=0)}
        source = shard("trainer", topic_input(BATCHES), topic_input(RELAY))
        self.step = TrainBatches(
            config=TrainingConfig(**(settings | config)),
            shard=source,
            model=model,
            store=folder / "store",
            checkpoints=folder / "checkpoints",
            result=folder / "model",
            keep_versions=50,
            metrics_s=0.0,
        )
        self.shard = Shard(self.log, self.step.resumed(), self.step.restore)

    def announce(self, manifest: WeightVersion) -> None:
        assert self.gate.wait(DEADLINE)
        if self.failures:
            raise self.failures.pop(0)
        self.log.append(RELAY, manifest, str(manifest.version))

    def notes(self, pipeline: str) -> dict[int, Note]:
        assert pipeline == "experience"
        return {0: Note(state={"batch": self.batches_made})}

    def configure(self, **changes: Any) -> None:
        """Stop the trainer and change the configuration of its next start."""
        self.shard.crash()
        self.step = replace(self.step, config=replace(self.step.config, **changes))
        self.shard = Shard(self.log, self.step.resumed(), self.step.restore)

    def start(self) -> None:
        self.shard.start()

    def feed(self, *numbers: int, parts: int = 1) -> None:
        for number in numbers:
            for part in make_batch(seed=number, number=number, groups=2, samples=2, parts=parts):
                self.log.append(BATCHES, part)

    def run(self, turns: int = 1) -> None:
        """Run `turns` turns, and wait for the publish of each version."""
        for _ in range(turns):
            coalesce(self.shard.run(), lambda topic: topic.name("run"))  # as the sink does
            self.settle()

    def settle(self) -> None:
        deadline = time.monotonic() + DEADLINE
        publisher = self.shard.fold._publishing.publisher  # type: ignore[union-attr]
        while publisher._pending is not None and not publisher._pending.done():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        self.shard.fold._checkpoints.finish()  # type: ignore[union-attr]

    def manifests(self) -> list[tuple[str, str | None, tuple[int, ...]]]:
        records: list[WeightVersion] = self.log.rows(RELAY)
        return [(str(m.version), None if m.parent is None else str(m.parent), m.batches) for m in records]

    def committed(self, topic: Topic) -> int:
        """The offset committed for the first partition of `topic`."""
        return self.log.committed(self.shard.config.group).offsets[PartitionKey(topic.short_name, 0)]

    def ancestry(self) -> list[int]:
        """The batches of the newest manifest and its ancestors, oldest first."""
        by_version: dict[PolicyVersion, WeightVersion] = {m.version: m for m in self.log.rows(RELAY)}
        version: PolicyVersion | None = max(by_version)
        batches: list[int] = []
        while version is not None:
            manifest = by_version[version]
            batches = [*manifest.batches, *batches]
            version = manifest.parent
        return batches

    def weights(self, version: str) -> dict[str, Any]:
        with WeightStore(self.folder / "store") as store:
            return load_file(store.path(PolicyVersion.parse(version)))

    def steps(self) -> list[int]:
        records: list[Metric] = self.log.rows(METRICS)
        return [record.step for record in records]
