"""Trains the batches of a run again, by as many ranks as have trained each of them."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from infra.kafka.note import uncommitted_consumer
from infra.kafka.properties import ClientProperties
from infra.kafka.role_notes import notes_reader
from infra.kafka.topic_reader import read_topic
from operators.trainer.checkpoint_files import RankLayout
from operators.trainer.rank_layouts import TrainedPart, trained_parts
from operators.trainer.rendezvous import Rendezvous
from operators.trainer.replay import Replay, Update, forked_ranks
from pipelines.config import Config
from schemas.records import MicroBatch
from schemas.topics import BATCHES

LogUpdates = Callable[[Iterator[Update]], Iterator[Update]]


class Replayed(NamedTuple):
    """What a replay did; `weights` is the digest of the final weights."""

    updates: Sequence[Update]
    skipped_records: int
    weights: str


@dataclass(frozen=True)
class TrainingReplay:
    """Trains the batches of the run of `config` up to number `end`, and writes the model to the new folder `model`.

    The ranks of each of `layouts` train in turn. `log_updates` passes updates on. It begins with the model, or with
    `checkpoint`, which includes the batches before number `begin`.
    """

    config: Config
    client: ClientProperties
    layouts: Sequence[RankLayout]
    end: int
    model: Path
    log_updates: LogUpdates = iter
    begin: int = 0
    checkpoint: Path | None = None

    def run(self) -> Replayed:
        """Train. Raises as `Replay`; what another process raises, as RuntimeError."""
        training, checkpoint, done = self.config.trainer, self.checkpoint, list[Replayed]()
        parts = list(trained_parts(training, self.layouts, self.begin, self.end)) or [TrainedPart(training, self.end)]
        with TemporaryDirectory() as states:
            for number, part in enumerate(parts[:-1]):
                state = Path(states) / str(number)
                done.append(_in_a_child(lambda: self._train(part, checkpoint, state)))  # noqa: B023 - called at once
                checkpoint = state
            done.append(self._train(parts[-1], checkpoint))
        updates = [update for part in done for update in part.updates]
        return Replayed(updates, sum(part.skipped_records for part in done), done[-1].weights)

    def _train(self, part: TrainedPart, checkpoint: Path | None, state: Path | None = None) -> Replayed:
        """Train `part` as its rank 0, with the other ranks in forks; write `state` or, without it, the model."""

        def train(rendezvous: Rendezvous, log_updates: LogUpdates = iter) -> Replayed:
            model, divisions = self.config.model_folder(), self.config.experience.divisions
            run = self.config.run.name
            notes = notes_reader(run, lambda: uncommitted_consumer(self.client))
            replay = Replay(part.config, model, rendezvous.ranks, divisions, checkpoint, notes)
            log = _Log(self.client, run)
            with closing(log.parts()) as parts:
                updates = list(log_updates(replay.train(parts, part.end)))
            if state is None:
                return Replayed(updates, log.undecodable + replay.rejected, replay.save(self.model))
            replay.save_state(state)
            return Replayed(updates, replay.rejected, "")  # the last part reads all that is undecodable

        with TemporaryDirectory() as folder, forked_ranks(part.config, train, Path(folder)) as first:
            return train(first, self.log_updates)


def _in_a_child(train: Callable[[], Replayed]) -> Replayed:
    """Call `train` in a fork, because a process can be a rank only once. Raises RuntimeError if it fails."""
    with TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"

        def run() -> None:
            try:
                replayed = train()
                result = {"updates": [asdict(each) for each in replayed.updates], "skipped": replayed.skipped_records}
            except Exception as error:  # noqa: BLE001 - raised again in the parent
                result = {"error": str(error)}
            found.write_text(json.dumps(result), "utf-8")

        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        process.join()
        if not found.exists():
            raise RuntimeError(f"a process of the replay ended with exit code {process.exitcode}")
        result = json.loads(found.read_text("utf-8"))
    if "error" in result:
        raise RuntimeError(result["error"])
    return Replayed([Update(**each) for each in result["updates"]], result["skipped"], "")


@dataclass
class _Log:
    """The batches topic of `run`. `undecodable` counts records that are not micro-batches; the trainer skipped them."""

    client: ClientProperties
    run: str
    undecodable: int = 0

    def parts(self) -> Generator[tuple[MicroBatch, int, int]]:
        """Yield the micro-batches with partition and offset."""
        for record in read_topic(self.client, BATCHES.name(self.run)):
            if record.error is None and all(isinstance(row, MicroBatch) for row in record.rows):
                yield from ((row, record.partition, record.offset) for row in record.rows)
            else:
                self.undecodable += 1
