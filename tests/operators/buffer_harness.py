"""The experience operator on a log in memory."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from in_memory_log import Log, Shard
from record_factories import PARTITIONS, experience, failed, manifest, prompt, shard, topic_input, trajectory, version

from infra.kafka.note import Note
from infra.kafka.role_notes import NotesUnavailable
from operators.experience.config import ExperienceConfig
from operators.experience.make_batches import MakeBatches
from operators.experience.pack_batches import pack_batches
from schemas.records import Experience, Pause, Prompt, Settled
from schemas.topics import BATCHES, CONTROL, CURRICULUM, EXPERIENCES, LEVEL_REPLY, RELAY, SETTLED, partition_of


class BufferInputs:
    """What the experience operator reads, in a log in memory."""

    log: Log
    partitions: int

    def score(self, *records: Experience) -> None:
        for record in records:
            asked = record.trajectory.prompt
            self.log.append(EXPERIENCES, record, asked.prompt_id, partition_of(asked.number, self.partitions))

    def score_drawn(self, draw: random.Random, asked: Prompt, member: int, oldest: int, newest: int) -> None:
        """Score a sample of a version from `oldest` to `newest`; one of ten has failed."""
        under = version(draw.randint(max(0, oldest), newest))
        broken = draw.random() < 0.1
        self.score(experience(failed(asked, member) if broken else trajectory(asked, member, under=under)))

    def group(self, number: int, samples: int = 2, **how: Any) -> None:
        asked = prompt(number, samples)
        self.score(*(experience(trajectory(asked, member, **how)) for member in range(samples)))

    def publish(self, number: int) -> None:
        self.log.append(RELAY, manifest(version(number)))


class Buffer(BufferInputs):
    """The experience operator on a log in memory."""

    def __init__(
        self,
        global_batch: int = 4,
        levels: int | dict[str, int] = 0,
        vocabulary: int | None = None,
        log: Log | None = None,
        rewards_failures: Mapping[str, bool] = MappingProxyType({}),
        **config: Any,
    ) -> None:
        self.log, self.partitions = log or Log(), PARTITIONS
        levels = levels if isinstance(levels, dict) else {"": levels}
        settings = ExperienceConfig(global_batch=global_batch, **config)
        step = MakeBatches(
            settings, PARTITIONS, levels=levels, vocabulary=vocabulary, rewards_failures=dict(rewards_failures)
        )
        control = topic_input(CONTROL, start="earliest")
        earliest = topic_input(RELAY), topic_input(CURRICULUM, keys=(LEVEL_REPLY,)), control
        inputs = topic_input(EXPERIENCES, keys=("p", "i"), blocks=True), *earliest
        pack = partial(pack_batches, budget=settings.micro_batch_tokens, shares=1)
        self.levels_begun: dict[str, list[tuple[int, int | None]]] | None = {}
        """In the note of prompts, the first prompts of levels; None: release 0.2.0 did not record them."""
        self.readable = True
        """Whether the note of prompts can be read."""
        restore = partial(step.restore, notes=self._notes)
        self.shard = Shard(self.log, shard("experience", *inputs, ledger=("settled",)), restore, pack)
        self.shard.start()

    def _notes(self, role: str) -> dict[int, Note]:
        if not self.readable:
            raise NotesUnavailable("no broker")
        levels = {} if self.levels_begun is None else {"levels": self.levels_begun}
        return {0: Note(state={"number": 1000, **levels})} if role == "prompts" else {}

    def pause(self, number: int, paused: bool = True) -> None:
        self.log.append(CONTROL, Pause(number, paused, "", "", 0), "pause")

    def batches(self) -> list[tuple[str, ...]]:
        found: dict[int, list[str]] = {}
        for part in sorted(self.log.rows(BATCHES), key=lambda part: (part.batch, part.index)):
            found.setdefault(part.batch, []).extend(part.trajectory_ids)
        assert list(found) == list(range(len(found)))
        return [tuple(names) for names in found.values()]

    def outcomes(self) -> dict[str, str]:
        records: list[Settled] = self.log.rows(SETTLED)
        assert len({r.trajectory_id for r in records}) == len(records)
        return {r.trajectory_id: r.outcome for r in records}
