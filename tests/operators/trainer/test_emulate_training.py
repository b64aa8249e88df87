"""The emulated trainer: durations, manifests and metrics, and restarts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from in_memory_log import Log, Shard
from record_factories import experience, manifest, prompt, shard, topic_input, trajectory, version
from sampled_batches import read_members

from infra.kafka.note import Note
from infra.kafka.producer import DeliveryFailed
from operators.experience.pack_batches import pack
from operators.io.elements import Restored, ShardFold
from operators.trainer.assembly import MissingBatch
from operators.trainer.emulate_training import RETRY_S, EmulateTraining, _EmulatedTraining, batch_statistics
from operators.trainer.emulation import TrainerEmulation
from operators.trainer.training_config import TrainingConfig
from schemas.block import Block
from schemas.records import MicroBatch, PolicyVersion, WeightVersion
from schemas.topics import BATCHES, DEAD_LETTERS, METRICS, RELAY


@cache
def _batch(number: int) -> list[MicroBatch]:
    """16 trajectories in two parts."""
    prompts = [prompt(4 * number + group, 4) for group in range(4)]
    rows = [
        experience(trajectory(one, member, tokens=1 + member), member / 4) for one in prompts for member in range(4)
    ]
    members = read_members(Block.of(rows), 0, 0)
    (parts,) = pack(number, members, np.full(16, number % 3), budget=60, shares=1)
    return [record for part in parts for record in part.records()]


class Trainer:
    """A trainer whose steps take 10 s, followed by a stall of 2 s and a broadcast of 1 s."""

    def __init__(
        self,
        steps: int = 5,
        every: int = 2,
        time_scale: float = 1.0,
        missing_batch_wait_s: float = 60.0,
        **emulation: Any,
    ) -> None:
        self.log, self.now, self.time_scale = Log(), 0.0, time_scale
        times = {"step_s": ((0, 10), (1, 10)), "stall_s": 2.0, "broadcast_s": 1.0, **emulation}
        self.config = TrainingConfig(
            optimizer_steps=steps,
            checkpoint_every=every,
            emulation=TrainerEmulation(**times),
            missing_batch_wait_s=missing_batch_wait_s,
        )
        self.broken, self.batches_made = False, 0
        self.shard = Shard(self.log, shard("trainer", topic_input(BATCHES), topic_input(RELAY)), self._restore)
        self.shard.start()

    def _restore(self, restored: Restored) -> ShardFold:
        step = EmulateTraining(self.config, self.shard.config, self.time_scale)  # type: ignore[arg-type]
        return _EmulatedTraining(
            *(step, restored, self._announce), clock=lambda: self.now, now=lambda: 0, notes=self._notes
        )

    def _notes(self, pipeline: str) -> dict[int, Note]:
        assert pipeline == "experience"
        return {0: Note(state={"batch": self.batches_made})}

    def _announce(self, manifest: WeightVersion) -> None:
        if self.broken:
            raise DeliveryFailed("no broker")
        self.log.append(RELAY, manifest, str(manifest.version))

    def batches(self, *numbers: int) -> None:
        for number in numbers:
            for part in _batch(number):
                self.log.append(BATCHES, part, str(number))

    def versions_at(self, now: float) -> list[str]:
        """The versions published at `now`, with all outputs committed."""
        self.now = now
        for _ in range(2):
            self.shard.turn()
            self.shard.commit()
        return [str(version.version) for version in self.manifests()]

    def manifests(self) -> list[WeightVersion]:
        return self.log.rows(RELAY)

    def restart(self) -> None:
        self.shard.crash()
        self.shard.start()


def test_emulation_publishes_after_step_stall_and_broadcast() -> None:
    trainer = Trainer()
    assert trainer.versions_at(0.0) == ["1.0"]
    trainer.batches(0, 1, 2)
    assert trainer.versions_at(100.0) == ["1.0"]
    assert trainer.versions_at(112.9) == ["1.0"]
    assert trainer.versions_at(113.1) == ["1.0", "1.1"]
    assert trainer.versions_at(124.9) == ["1.0", "1.1"]  # the second step begins after the stall, at 112
    assert trainer.versions_at(125.1) == ["1.0", "1.1", "1.2"]
    assert trainer.versions_at(137.1) == ["1.0", "1.1", "1.2", "1.3"]
    metrics = trainer.log.rows(METRICS)
    assert [metric.step for metric in metrics] == [1, 2, 3]
    assert [metric.values["time/wait"] for metric in metrics] == [100.0, 0.0, 0.0]
    assert metrics[0].values["time/update"] == 10.0
    assert [metric.values["queue/lag"] for metric in metrics] == [2.0, 1.0, 0.0]
    assert metrics[0].values["trainer/idle_ratio"] == pytest.approx(100 / 112)
    assert metrics[0].values.items() >= batch_statistics(_batch(0)).items()


def test_emulation_reports_batch_statistics() -> None:
    assert len(_batch(2)) == 2
    found = batch_statistics(_batch(2))
    assert (found["reward/mean"], found["response_length/mean"], found["response_length/max"]) == (0.375, 2.5, 4.0)
    assert (found["staleness/mean"], found["staleness/max"], found["tokens"]) == (2.0, 2.0, 16 * 3 + 40.0)


def test_emulation_result_is_independent_of_poll_times() -> None:
    late, often = Trainer(), Trainer()
    for trainer in (late, often):
        trainer.versions_at(0.0)
        trainer.batches(0, 1, 2)
        trainer.versions_at(1.0)
    for now in range(2, 60):
        often.versions_at(float(now))
    late.versions_at(59.0)
    assert late.manifests() == often.manifests()
    assert late.log.rows(METRICS) == often.log.rows(METRICS)


def test_time_scale_divides_all_durations() -> None:
    trainer = Trainer(time_scale=10.0)
    trainer.versions_at(0.0)
    trainer.batches(0)
    trainer.versions_at(1.0)
    assert trainer.versions_at(2.29) == ["1.0"]
    assert trainer.versions_at(2.31) == ["1.0", "1.1"]


def test_manifests_name_batches_offsets_and_parent() -> None:
    trainer = Trainer(steps=3)
    trainer.versions_at(0.0)
    trainer.batches(0, 1, 2, 3)
    trainer.versions_at(1.0)
    trainer.versions_at(100.0)
    first, second, third, last = trainer.manifests()
    assert (first.parent, first.batches, first.bytes, first.final) == (None, (), 0, False)
    assert (second.version, second.parent, second.batches) == (version(1), version(0), (0,))
    assert (third.parent, third.batches, third.trajectories_trained, third.final) == (version(1), (1,), 32, False)
    assert (last.parent, last.batches, last.batch_offsets, last.final) == (version(2), (2,), (6,), True)


def test_restart_retrains_and_publishes_only_the_last_version() -> None:
    trainer = Trainer(steps=9, every=2)
    trainer.versions_at(0.0)
    trainer.batches(*range(4))
    trainer.versions_at(1.0)
    assert trainer.versions_at(38.1)[-1] == "1.3"  # version 2 is checkpointed, version 3 only published
    trainer.restart()
    trainer.versions_at(40.0)
    assert trainer.versions_at(90.0)[4:] == ["2.3", "2.4"]
    again, after = trainer.manifests()[4:]
    assert (again.parent, again.batches, again.trajectories_trained) == (version(2), (2,), 48)
    assert (after.parent, after.batches) == (PolicyVersion(2, 3), (3,))


def test_restart_publishes_retrained_batches_in_one_manifest() -> None:
    trainer = Trainer(steps=9, every=10)
    trainer.versions_at(0.0)
    trainer.batches(0, 1, 2)
    trainer.versions_at(1.0)
    assert trainer.versions_at(38.5)[-1] == "1.3"
    trainer.restart()
    trainer.versions_at(40.0)
    assert trainer.versions_at(90.0)[4:] == ["2.3"]
    assert (trainer.manifests()[-1].parent, trainer.manifests()[-1].batches) == (version(0), (0, 1, 2))


def test_crash_at_any_time_keeps_all_batches_in_the_ancestry() -> None:
    for crash_at in range(1, 90, 4):
        trainer = Trainer(steps=6, every=3)
        trainer.versions_at(0.0)
        trainer.batches(*range(6))
        for now in range(1, crash_at):
            trainer.versions_at(float(now))
        trainer.restart()
        for now in range(crash_at, 200, 3):
            trainer.versions_at(float(now))
        by_version = {manifest.version: manifest for manifest in trainer.manifests()}
        newest = max(by_version)
        ancestry: list[int] = []
        ancestor: PolicyVersion | None = newest
        while ancestor is not None:
            ancestry += by_version[ancestor].batches
            ancestor = by_version[ancestor].parent
        assert sorted(ancestry) == list(range(6)), f"death at {crash_at}"
        assert by_version[newest].final
        assert by_version[newest].trajectories_trained == 96


def test_deviation_changes_steps_but_not_their_mean() -> None:
    emulation = TrainerEmulation(deviation=0.5)
    factors = [emulation.factor(step) for step in range(4000)]
    assert np.mean(factors) == pytest.approx(1.0, abs=0.03)
    assert np.std(factors) == pytest.approx(0.5, abs=0.03)
    assert factors[7] == TrainerEmulation(deviation=0.5).factor(7)
    assert TrainerEmulation().factor(7) == 1.0
    trainer = Trainer(deviation=0.5)
    trainer.versions_at(0.0)
    trainer.batches(0, 1)
    trainer.versions_at(0.0)
    trainer.versions_at(500.0)
    assert [metric.values["time/update"] for metric in trainer.log.rows(METRICS)] == [10 * each for each in factors[:2]]


def test_emulation_retries_a_failed_manifest() -> None:
    trainer = Trainer()
    trainer.versions_at(0.0)
    trainer.batches(0)
    trainer.versions_at(1.0)
    trainer.broken = True
    assert trainer.versions_at(20.0) == ["1.0"]
    trainer.broken = False
    assert trainer.versions_at(20.0 + RETRY_S / 2) == ["1.0"]
    assert trainer.versions_at(20.0 + RETRY_S) == ["1.0", "1.1"]


def test_emulation_waits_until_the_log_is_read() -> None:
    trainer = Trainer()
    trainer.log.append(RELAY, manifest(PolicyVersion(0, 3), (0, 1, 2)))
    trainer.batches(0, 1, 2)
    trainer.restart()
    trainer.versions_at(0.0)
    assert trainer.versions_at(100.0) == ["0.3", "2.3"]


def test_step_table_is_linear_between_and_beyond_rows() -> None:
    emulation = TrainerEmulation(step_s=((0, 5.0), (100, 15.0), (200, 15.0), (300, 45.0)))
    found = [emulation.seconds(tokens) for tokens in (0, 50, 100, 150, 250, 400)]
    assert found == [5.0, 10.0, 15.0, 15.0, 30.0, 75.0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"step_s": ((0, 1),)}, "two or more rows"),
        ({"step_s": ((0, 1), (0, 2))}, "rising tokens"),
        ({"step_s": ((0, 2), (5, 1))}, "non-falling"),
        ({"step_s": ((0, -1), (5, 1))}, "step_s must be at least 0, not -1"),
        ({"stall_s": -1.0}, "stall_s must be at least 0"),
    ],
)
def test_emulation_config_rejects_invalid_values(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainerEmulation(**wrong)


def test_emulation_dead_letters_repeated_and_early_batches() -> None:
    trainer = Trainer()
    trainer.versions_at(0.0)
    trainer.batches(0, 2, 0, 1)
    trainer.versions_at(1.0)
    assert trainer.versions_at(100.0) == ["1.0", "1.1", "1.2"]
    trainer.batches(2)
    trainer.versions_at(120.0)
    assert trainer.versions_at(200.0) == ["1.0", "1.1", "1.2", "1.3"]
    reasons = [letter.reason for letter in trainer.log.rows(DEAD_LETTERS)]
    assert reasons == ["batch 0 was accepted before, the next one is 1"] * 2 + ["batch 2 arrived before batch 1"] * 2


def test_emulation_fails_on_a_missing_batch_unless_lost() -> None:
    trainer = Trainer(missing_batch_wait_s=30.0)
    trainer.versions_at(0.0)
    trainer.batches(0, 2)
    trainer.batches_made = 3
    trainer.versions_at(10.0)
    trainer.versions_at(39.0)
    with pytest.raises(MissingBatch, match="batch 1 is missing"):
        trainer.versions_at(70.0)
    trainer.config = replace(trainer.config, lost_batches=(1,))
    trainer.restart()
    trainer.versions_at(71.0)
    trainer.versions_at(100.0)
    trainer.versions_at(130.0)
    assert [(m.version.number, m.batches, m.untrained_batches) for m in trainer.manifests()][-1] == (3, (2,), ())
    assert [m.untrained_batches for m in trainer.manifests() if m.untrained_batches] == [(1,)]


def test_emulation_waits_for_a_batch_that_is_not_made() -> None:
    """Another program has written a batch far ahead."""
    trainer = Trainer(missing_batch_wait_s=30.0)
    trainer.versions_at(0.0)
    trainer.batches(10**6)
    trainer.versions_at(1.0)
    assert trainer.versions_at(10_000.0) == ["1.0"]
    trainer.batches_made = 1  # its note is visible before the batch is
    assert trainer.versions_at(10_031.0) == ["1.0"]
    trainer.batches(0)
    trainer.versions_at(10_062.0)
    assert trainer.versions_at(20_000.0) == ["1.0", "1.1"]


def test_empty_batch_makes_a_version_and_a_dead_letter() -> None:
    trainer = Trainer()
    trainer.versions_at(0.0)
    trainer.log.append(BATCHES, replace(_batch(0)[0], index=0, count=1, trajectory_ids=()))
    trainer.versions_at(0.0)
    assert trainer.versions_at(100.0) == ["1.0", "1.1"]
    assert trainer.manifests()[-1].untrained_batches == (0,)
    (letter,) = trainer.log.rows(DEAD_LETTERS)
    assert (letter.step, letter.offset, letter.reason) == ("train", 0, "the batch has no trajectory")
