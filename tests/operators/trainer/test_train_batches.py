"""The trainer as a role: published versions, restarts and replays, failures."""

from __future__ import annotations

import math
import pickle
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from in_memory_log import Shard
from trainer_batches import make_batch, with_floats
from trainer_on_a_log import Producer, Trainer

from infra.models.weights import weights_digest
from infra.store import incoming_version as arriving
from infra.store.weight_store import WeightStore
from infra.system import OperatingSystem
from operators.io.elements import Polled
from operators.trainer import rank_training, version_publisher
from operators.trainer.config import LearnerConfig
from operators.trainer.learner import Learner
from operators.trainer.rank_services import RankServices
from operators.trainer.ranks import ALONE, Ranks
from operators.trainer.replay import Replay, folder_digest
from schemas.topics import BATCHES, METRICS, RELAY


def test_each_batch_makes_a_version_naming_batch_and_parent(trainer: Trainer) -> None:
    trainer.start()
    trainer.run()
    trainer.feed(0, 1, parts=2)
    trainer.run(3)
    assert trainer.manifests() == [("1.0", None, ()), ("1.1", "1.0", (0,)), ("1.2", "1.1", (1,))]
    assert trainer.steps() == [1, 2]
    assert trainer.committed(BATCHES) == 4
    (last,) = trainer.log.rows(RELAY)[-1:]
    assert (last.batch_offsets, last.trajectories_trained, last.final) == ((4,), 8, False)


def test_trainer_waits_for_the_last_part_of_a_batch(trainer: Trainer) -> None:
    trainer.start()
    first, second = make_batch(seed=0, groups=2, samples=2, parts=2)
    trainer.log.append(BATCHES, first)
    trainer.run(2)
    assert trainer.steps() == []
    assert not trainer.shard.fold.busy()  # type: ignore[union-attr]
    trainer.log.append(BATCHES, second)
    trainer.run()
    assert trainer.steps() == [1]


def test_fold_takes_one_update_and_is_busy_with_more(trainer: Trainer) -> None:
    trainer.start()
    trainer.run()
    trainer.feed(0, 1)
    trainer.run()
    assert (trainer.steps(), trainer.shard.fold.busy()) == ([1], True)  # type: ignore[union-attr]
    trainer.run()
    assert (trainer.steps(), trainer.shard.fold.busy()) == ([1, 2], False)  # type: ignore[union-attr]
    assert [metric.values["queue/lag"] for metric in trainer.log.rows(METRICS)] == [1.0, 0.0]


def test_metrics_wait_while_a_restart_would_repeat_them(trainer: Trainer) -> None:
    """They share a transaction, but each is written at the latest with the checkpoint that covers its batch."""
    trainer.step = replace(trainer.step, metrics_s=math.inf)
    trainer.configure(checkpoint_every=3, optimizer_steps=8)
    trainer.start()
    trainer.feed(*range(8))
    seen = []
    for _ in range(5):
        trainer.run()
        seen.append(trainer.steps())
    assert seen == [[1], [1], [1, 2, 3], [1, 2, 3], [1, 2, 3]]
    trainer.shard.crash()
    trainer.start()
    trainer.run(2)
    assert trainer.steps() == [1, 2, 3, 4]
    assert trainer.shard.fold is not None
    (final,) = trainer.shard.fold.fold(Polled("trainer", 2, (), (), {}, False, last=True))
    assert final.record.step == 5, "a stop writes what waits"
    trainer.run(3)
    assert trainer.steps() == [1, 2, 3, 4, 6, 7, 8], "the last step's metric does not wait"


def test_last_version_is_final_and_written_as_a_model(trainer: Trainer) -> None:
    trainer.start()
    trainer.run()
    trainer.feed(*range(8))
    trainer.run(9)
    assert [m.final for m in trainer.log.rows(RELAY)] == [False] * 6 + [True]
    assert trainer.steps() == [1, 2, 3, 4, 5, 6]
    assert (trainer.folder / "model" / "config.json").exists()
    assert sorted(each.name for each in (trainer.folder / "checkpoints").iterdir()) == ["1.4", "1.6"]
    assert not trainer.shard.fold.busy()  # type: ignore[union-attr]


def test_restart_resumes_from_checkpoint_under_the_next_epoch(trainer: Trainer) -> None:
    trainer.start()
    trainer.run()
    trainer.feed(*range(5))
    trainer.run(6)
    assert trainer.manifests()[-1] == ("1.5", "1.4", (4,))
    trainer.start()
    resumed = {place.topic: offset for place, offset in trainer.shard.restored.offsets.items()}  # type: ignore[union-attr]
    assert resumed == {BATCHES.short_name: 4, RELAY.short_name: 2}  # the manifest of the older of two checkpoints
    trainer.run(3)
    assert trainer.manifests()[-1] == ("2.5", "1.4", (4,))  # of the published versions only the last one again
    assert trainer.ancestry() == [0, 1, 2, 3, 4]
    old, new = trainer.weights("1.5"), trainer.weights("2.5")
    assert all((old[name] == new[name]).all() for name in old)
    trainer.feed(5)
    trainer.run(2)
    assert trainer.ancestry() == [0, 1, 2, 3, 4, 5]


def test_restart_publishes_only_the_last_replayed_version(trainer: Trainer) -> None:
    trainer.start()
    trainer.run()
    trainer.feed(0, 1, 2)
    trainer.run(4)
    shutil.rmtree(trainer.folder / "checkpoints")
    trainer.feed(3)
    trainer.start()
    trainer.run(5)
    assert trainer.manifests()[4:] == [("2.3", None, (0, 1, 2)), ("2.4", "2.3", (3,))]
    assert trainer.ancestry() == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(4))
def test_crash_anywhere_leaves_the_weights_of_a_replay(trainer: Trainer, seed: int) -> None:
    """Crashes between random turns; some batches arrive late, and one cannot be trained.

    Before a random batch, copies of another one are in the log under numbers that are not the next one.
    """
    rng = random.Random(seed)
    trainer.start()
    bad, strange = rng.randrange(6), rng.randrange(6)
    (row,) = make_batch(seed=bad, number=bad, groups=2, samples=2)
    for number in range(6):
        if number == strange:
            for other in (-1, number - 1, number + 1, 10**17):
                trainer.log.append(BATCHES, replace(row, batch=other))
        if number == bad:
            trainer.log.append(BATCHES, with_floats(row, "rewards", {0: float("nan")}))
        else:
            trainer.feed(number, parts=2)
        while rng.random() < 0.6:
            trainer.run(rng.randrange(3))
            trainer.start()
    trainer.run(9)
    replay = Replay(trainer.step.config, trainer.step.model)
    parts = [(part, 0, offset) for offset, part in enumerate(trainer.log.rows(BATCHES))]
    updates = list(replay.train(parts))
    assert [update.batch for update in updates if update.reason] == [bad]
    assert replay.rejected == 4
    assert folder_digest(trainer.folder / "model") == weights_digest(dict(replay._learner.weights().items()))
    assert trainer.ancestry() == list(range(6))
    assert [m.untrained_batches for m in trainer.log.rows(RELAY) if m.untrained_batches][-1] == (bad,)


def test_trainer_reads_manifests_before_it_trains(trainer: Trainer) -> None:
    trainer.start()
    trainer.run()
    trainer.feed(0, 1, 2)
    trainer.run(4)
    trainer.start()
    batches = [place for place in trainer.shard.places if place.topic == BATCHES.short_name]
    assert trainer.shard.turn(only=batches) == ()
    trainer.run(3)
    assert trainer.manifests()[-1] == ("2.3", "1.2", (2,))


def test_restart_before_the_first_batch_republishes(trainer: Trainer) -> None:
    trainer.start()
    trainer.run()
    trainer.start()
    trainer.run()
    assert trainer.manifests() == [("1.0", None, ()), ("2.0", None, ())]


def test_restart_after_the_end_repeats_the_last_metric(trainer: Trainer) -> None:
    trainer.start()
    trainer.run()
    trainer.feed(*range(7))
    trainer.run(8)
    manifests = trainer.manifests()
    trainer.start()
    trainer.run(3)
    assert trainer.manifests() == manifests
    assert trainer.steps() == [1, 2, 3, 4, 5, 6, 6]


@pytest.mark.parametrize("batches", [5, 6])
def test_restart_restores_a_version_lost_from_the_store(trainer: Trainer, batches: int) -> None:
    trainer.start()
    trainer.run()
    trainer.feed(*range(batches))
    trainer.run(7)
    resumed = "1.4" if batches == 5 else "1.6"
    before, manifests = trainer.weights(resumed), trainer.manifests()
    trainer.shard.crash()
    shutil.rmtree(trainer.folder / "store")
    trainer.start()
    trainer.run(1)
    after = trainer.weights(resumed)
    assert all((before[name] == after[name]).all() for name in before)
    trainer.run(2)
    assert trainer.manifests() == manifests + ([("2.5", "1.4", (4,))] if batches == 5 else [])


@pytest.mark.parametrize("batches", [5, 6])
def test_lost_version_with_other_bits_is_published_as_another(
    trainer: Trainer, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of LoRA's adapters may have other bits on other hardware, and rollouts cannot wait for the former ones."""
    trainer.start()
    trainer.run()
    trainer.feed(*range(batches))
    trainer.run(7)
    resumed, again = ("1.4", "2.4") if batches == 5 else ("1.6", "2.6")
    before, manifests = trainer.weights(resumed), trainer.manifests()
    trainer.shard.crash()
    shutil.rmtree(trainer.folder / "store")
    seal = arriving.IncomingVersion.seal
    monkeypatch.setattr(arriving.IncomingVersion, "seal", lambda made, bits=None: seal(made, bits and "other bits"))
    trainer.start()
    trainer.run(1)
    after = trainer.weights(again)
    assert all((before[name] == after[name]).all() for name in before)
    trainer.run(2)
    assert trainer.manifests() == [*manifests, (again, resumed, ()), *([("2.5", "2.4", (4,))] if batches == 5 else [])]
    assert trainer.log.rows(RELAY)[-1].final is (batches == 6)


@pytest.mark.parametrize("missing", ["result", "checkpoint"])
def test_restart_writes_a_missing_final_model(trainer: Trainer, missing: str) -> None:
    trainer.start()
    trainer.run()
    trainer.feed(*range(6))
    trainer.run(7)
    lost = trainer.folder / ("model" if missing == "result" else "checkpoints/1.6")
    lost.rename(trainer.folder / "lost")
    trainer.start()
    trainer.run(4)
    assert (trainer.folder / "model" / "config.json").exists()
    newest = trainer.log.rows(RELAY)[-1]
    assert newest.final
    assert trainer.ancestry() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("trainer", [100], indirect=True)
def test_skipped_version_is_published_when_idle(trainer: Trainer) -> None:
    trainer.start()
    trainer.run()
    trainer.gate.clear()
    trainer.feed(0, 1)
    trainer.shard.run(2)  # the first version is in transit, so the second is skipped
    trainer.gate.set()
    trainer.settle()
    assert trainer.manifests() == [("1.0", None, ()), ("1.1", "1.0", (0,))]
    trainer.run()
    assert trainer.manifests()[2:] == [("1.2", "1.1", (1,))]
    trainer.run(2)
    assert len(trainer.manifests()) == 3


@pytest.mark.parametrize("failing", [1, 2, 6])
def test_failed_publish_is_retried(trainer: Trainer, failing: int) -> None:
    trainer.start()
    trainer.run()
    for number in range(failing):
        trainer.feed(number)
        if number == failing - 1:
            trainer.failures = [OSError("no broker"), OSError("no broker")]
        trainer.run()
    trainer.run(6)
    assert trainer.manifests()[-1][0] == f"1.{failing}"
    assert trainer.ancestry() == list(range(failing))
    assert len(trainer.manifests()) == failing + 1
    saved = [each.name for each in (trainer.folder / "checkpoints").glob("1.*")]
    assert (f"1.{failing}" in saved) is (failing % 2 == 0)
    assert (trainer.folder / "model").exists() is (failing == 6)


def test_full_store_is_retried_with_backoff_while_training(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds, attempts = [0], list[int]()

    def no_room(folder: Path) -> int:
        attempts.append(seconds[0])
        return 0

    system = OperatingSystem()
    system.monotonic = lambda: 1000.0 + seconds[0]  # type: ignore[method-assign]
    monkeypatch.setattr(RankServices, "system", system)
    monkeypatch.setattr(version_publisher, "RETRY_S", 1.0)
    trainer.start()
    trainer.run()
    with monkeypatch.context() as full:
        full.setattr(arriving, "free_bytes", no_room)
        trainer.feed(0, 1, 2)
        trainer.run(3)  # memory for the first version was already reserved
        assert trainer.steps() == [1, 2, 3]
        assert [version for version, _, _ in trainer.manifests()] == ["1.0", "1.1"]
        assert trainer.weights("1.1")
        assert "has 0 bytes free" in caplog.text
        attempts.clear()
        for seconds[0] in range(1, 60):
            trainer.run()
        assert attempts == [1, 2, 4, 8, 16, 32, 48]
    seconds[0] = 64
    trainer.run(2)
    assert trainer.manifests()[2:] == [("1.3", "1.1", (1, 2))]


def test_close_frees_resources_after_a_failed_publish(trainer: Trainer) -> None:
    trainer.start()
    trainer.run()
    trainer.failures = [OSError("no broker")]
    trainer.feed(0)
    trainer.shard.run()
    trainer.shard.crash()
    assert Producer.made[-1].closed
    with WeightStore(trainer.folder / "store") as store:
        store.reserve(8)  # the store has no other writer


def feed_rewarded(trainer: Trainer, number: int, logprobs: dict[int, float] | None = None) -> None:
    """Append a batch in whose groups the rewards differ, so that every row is trained."""
    (row,) = make_batch(seed=number, number=number, groups=2, samples=2)
    row = with_floats(row, "rewards", {0: 0.0, 1: 1.0, 2: 0.0, 3: 1.0})
    trainer.log.append(BATCHES, with_floats(row, "logprobs", logprobs or {}))


def test_trainer_goes_on_after_a_nonfinite_loss(trainer: Trainer) -> None:
    """The metrics of the skipped step fit their record, without the values that are not finite."""
    trainer.start()
    trainer.run()
    feed_rewarded(trainer, 0)
    feed_rewarded(trainer, 1)
    head = trainer.shard.fold._training.model.get_output_embeddings()  # type: ignore[union-attr]
    hook = head.register_forward_hook(lambda *args: args[2] * math.inf)
    trainer.run()
    hook.remove()
    trainer.run()
    skipped, trained = (metric.values for metric in trainer.log.rows(METRICS))
    assert not {"loss", "grad_norm", "entropy"} & set(skipped)
    assert {"loss", "grad_norm", "entropy"} < set(trained)
    assert skipped["skipped_updates"] == trained["skipped_updates"] == 1
    assert [manifest[0] for manifest in trainer.manifests()] == ["1.0", "1.1", "1.2"]


def test_distant_behaviour_logprobs_leave_metrics_finite(trainer: Trainer) -> None:
    """Imported experience may have logprobs such as -100: π/μ is then beyond float32."""
    trainer.start()
    trainer.run()
    feed_rewarded(trainer, 0, logprobs={-1: -100.0})
    trainer.run()
    (metric,) = trainer.log.rows(METRICS)
    assert 20 < metric.values["kl/mismatch"] < math.inf


class CountedLearner(Learner):
    """Another learner in the place of the product's."""

    opened: ClassVar[list[CountedLearner]] = []

    def __init__(self, config: LearnerConfig, model_folder: Path, device: str = "cpu", ranks: Ranks = ALONE) -> None:
        super().__init__(config, model_folder, device, ranks)
        self.opened.append(self)


def test_another_learner_trains_the_log_and_its_replay(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(trainer.step.config, learner=LearnerConfig(name=f"{__name__}:CountedLearner", warmup_steps=0))
    monkeypatch.setattr(rank_training, "check_device_memory", None)  # the plan is for the built-in learner
    trainer.step = replace(trainer.step, config=config)
    trainer.shard = Shard(trainer.log, trainer.step.resumed(), pickle.loads(pickle.dumps(trainer.step)).restore)
    trainer.start()
    trainer.feed(0, 1)
    trainer.run(3)
    parts = [(part, 0, offset) for offset, part in enumerate(trainer.log.rows(BATCHES))]
    replay = Replay(trainer.step.config, trainer.step.model)
    assert len(list(replay.train(parts))) == 2
    assert [learner.updates for learner in CountedLearner.opened] == [2, 2]
    published = trainer.weights("1.2")
    assert all((tensor.numpy() == published[name]).all() for name, tensor in replay._learner.weights().items())
