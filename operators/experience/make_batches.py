"""MakeBatches: the streaming experience buffer. Experiences in, global batches out, each settled as it leaves."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from operators.experience.config import ExperienceConfig
from operators.experience.groups import GroupBuffer, Held
from operators.experience.packing import pack
from operators.experience.trainable import untrainable
from operators.io.elements import Checkpoint, Output, Place, Polled, Received, Restored
from operators.io.ledger import TrajectoryLedger
from operators.io.pending import PendingOffsets
from schemas.identity import TrajectoryKey, parse_trajectory_id
from schemas.records import Fate, Metric, PolicyVersion, Settled, WeightVersion
from schemas.topics import BATCHES, EXPERIENCES, METRICS, SETTLED


@dataclass(frozen=True)
class MakeBatches:
    """One global batch is one transaction: its micro-batches, a Settled for each member, and the low-water mark.

    A batch has `global_batch` trajectories at least, all of which can be trained; what cannot is settled as it comes,
    and its group completes without it. Staleness is measured here, at consumption: newest announced version minus the
    version that generated.
    """

    config: ExperienceConfig
    partitions: int

    def restore(self, restored: Restored) -> _Buffering:
        settled = TrajectoryLedger(self.partitions, restored.marks.get("settled"))
        for received in restored.ledger:
            key = parse_trajectory_id(received.record.trajectory_id)
            if key.purpose == "train":  # evaluation settles its own, in the same topic
                settled.add(key, received.record.group_size, 0)
        return _Buffering(self, settled, restored.marks.get("batch", 0))


class _Buffering:
    def __init__(
        self,
        step: MakeBatches,
        settled: TrajectoryLedger,
        batch: int,
        now: Callable[[], int] = lambda: time.time_ns() // 10**6,
    ) -> None:
        self._config, self._settled, self._now = step.config, settled, now
        self._batch = batch
        self._buffer = GroupBuffer()
        self._held: set[TrajectoryKey] = set()
        self._pending = PendingOffsets()
        self._newest: PolicyVersion | None = None
        self._emissions = 0
        self._dropped = 0

    def fold(self, polled: Polled) -> list[Output]:
        self._emissions += 1
        outputs: list[Output] = []
        for received in polled.records:
            if isinstance(received.record, WeightVersion):
                self._newest = max(filter(None, (self._newest, received.record.version)))
            else:
                outputs += self._take(received)
        while polled.caught_up and self._buffer.has(self._config.global_batch):
            if self._config.drop_over_age:
                outputs += self._drop_over_age()
            groups = self._buffer.take(self._config.global_batch)
            if groups is not None:
                outputs += self._make_batch([held for group in groups for held in group])
        return outputs

    def checkpoint(self, positions: Mapping[Place, int]) -> Checkpoint:
        return Checkpoint(
            low_water=self._pending.low_water(positions),
            ledger_from=self._settled.oldest_emission(),
            marks={"settled": self._settled.marks(), "batch": self._batch},
        )

    def busy(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def _take(self, received: Received) -> list[Output]:
        trajectory = received.record.trajectory
        key = parse_trajectory_id(trajectory.trajectory_id)
        if key in self._settled or key in self._held:
            return []  # settled before a restart, or a second finish
        self._held.add(key)
        self._pending.add(Place(received.topic, received.partition), received.offset)
        held = Held(received.partition, received.offset, received.record)
        reason = untrainable(received.record)
        outputs: list[Output] = []
        if reason is None:
            self._buffer.add(held)
        else:
            outputs = [self._settle(held, "failed", reason, None)]
        self._buffer.complete(trajectory.prompt, self._settled.answered(key.purpose, key.number))
        return outputs

    def _drop_over_age(self) -> list[Output]:
        most = self._config.max_staleness
        dropped = [
            (held, self._staleness(held)) for held in self._buffer.evict(lambda held: self._staleness(held) > most)
        ]
        self._dropped += len(dropped)
        return [self._settle(held, "dropped", f"staleness {age} > {most}", age) for held, age in dropped]

    def _make_batch(self, members: Sequence[Held]) -> list[Output]:
        ages = [self._staleness(held) for held in members]
        parts = pack(self._batch, members, ages, self._config.micro_batch_tokens)
        outputs = [Output(BATCHES, str(self._batch), part, part.rank) for part in parts]
        outputs += [self._settle(held, "batched", "", age) for held, age in zip(members, ages, strict=True)]
        outputs.append(
            Output(METRICS, "experience", Metric("experience", self._batch, self._values(ages), self._now()))
        )
        self._batch += 1
        return outputs

    def _staleness(self, held: Held) -> int:
        """Versions between the newest announced and the one that generated."""
        version = held.experience.trajectory.version_spans[0].version
        return max(0, self._newest.number - version.number) if self._newest else 0

    def _settle(self, held: Held, fate: Fate, reason: str, staleness: int | None) -> Output:
        trajectory = held.experience.trajectory
        key, size = parse_trajectory_id(trajectory.trajectory_id), trajectory.prompt.samples
        self._settled.add(key, size, self._emissions)
        self._held.discard(key)
        self._pending.remove(Place(EXPERIENCES.noun, held.partition), held.offset)
        batch = self._batch if fate == "batched" else None
        tokens = len(trajectory.response.token_ids)
        record = Settled(trajectory.trajectory_id, size, fate, reason, batch, staleness, tokens, self._now())
        return Output(SETTLED, trajectory.trajectory_id, record)

    def _values(self, ages: Sequence[int]) -> dict[str, float]:
        histogram = {f"staleness/{age}": float(count) for age, count in sorted(Counter(ages).items())}
        return {
            "buffer/trajectories": float(self._buffer.trajectories),
            "buffer/groups": float(self._buffer.groups),
            "dropped/stale": float(self._dropped),
            **histogram,
        }
