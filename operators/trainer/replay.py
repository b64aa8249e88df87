"""Training again from a log of batches, without a run around it: what was learned once, or what would have been."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from infra.models.checkpoint_folder import load_model, load_tokenizer, save_folder
from infra.models.weights import weight_tensors, weights_digest
from operators.trainer.assembly import BatchAssembly, WholeBatch
from operators.trainer.checkpoint import read_checkpoint
from operators.trainer.learner import Learner
from operators.trainer.ranks import ALONE, Ranks
from operators.trainer.rendezvous import join_process_group
from operators.trainer.training_config import TrainingConfig
from schemas.records import MicroBatch
from schemas.topics import batch_partitions


@dataclass(frozen=True, slots=True)
class Update:
    """One batch that was trained, or was not: then `why` says what is wrong with it and `values` is empty.

    `step` counts the batches so far: each makes a version.
    """

    batch: int
    step: int
    values: dict[str, float] = field(default_factory=dict)
    reason: str | None = None


class Replay:
    """A learner of `model`, fed from a log. The same batches under the same configuration give the run's own bits.

    `recorded` is how many ranks the batches were made for: this is one of as many `ranks`, or alone with all parts,
    which `shards` of the buffer have made. It begins with `checkpoint`, where the log was trimmed, or with the model.
    Raises CheckpointError where that cannot be read.
    """

    def __init__(
        self,
        config: TrainingConfig,
        model: Path,
        recorded: int = 1,
        ranks: Ranks = ALONE,
        shards: int = 1,
        checkpoint: Path | None = None,
    ) -> None:
        torch.set_num_threads(config.threads)
        self._model, self._ranks, self._config, self._shards = model, ranks, config, shards
        self._partitions = range(recorded * shards) if ranks.count == 1 else batch_partitions(ranks.rank, shards)
        self._learner = Learner(config.learner, model, config.device_of(ranks.rank), ranks)
        self._taken, self._starts = 0, dict.fromkeys(self._partitions, 0)
        if checkpoint is not None:
            state, position = read_checkpoint(checkpoint)
            self._learner.restore(state)
            self._taken = position.version.number
            self._starts = {partition: position.batch_offsets[partition] for partition in self._partitions}
        self.rejected = 0
        """Parts that were not accepted, as in the run (see `BatchAssembly`)."""

    def train(self, parts: Iterable[tuple[MicroBatch, int, int]], limit: int | None = None) -> Iterator[Update]:
        """Train the batches whose parts come with partition and offset, `most` of them where it is given.

        Batches are accepted and passed over as in a run. Raises MissingBatch where the next one is missing.
        """
        if limit is not None and self._taken >= limit:
            return
        assembly = BatchAssembly(
            self._partitions,
            shards=self._shards,
            first=self._taken,
            lost=self._config.lost_batches,
            starts=self._starts.values(),
        )
        for batch in self._whole(assembly, parts):
            yield self._update(batch)
            if self._taken == limit:
                return
        if (missing := assembly.missing()) is not None:
            raise missing

    def weights(self) -> dict[str, Tensor]:
        """The weights as they are; all ranks must ask."""
        return self._learner.weights()

    def save(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write the model with its `weights` to the new folder `folder`. Raises FileExistsError if it is there."""
        save_folder(self._learner.plain_model(weights), load_tokenizer(self._model), folder)

    def _whole(self, assembly: BatchAssembly, parts: Iterable[tuple[MicroBatch, int, int]]) -> Iterator[WholeBatch]:
        yield from assembly.take()
        for part, partition, offset in parts:
            if offset >= self._starts.get(partition, offset + 1):
                yield from assembly.add(part, partition, offset)
                self.rejected += len(assembly.rejected)
                assembly.rejected.clear()

    def _update(self, batch: WholeBatch) -> Update:
        self._taken += 1
        try:
            rows = sum(len(part.trajectory_ids) for part in batch.parts)
            if not sum(self._ranks.total([float(rows)])):
                raise ValueError("it has no trajectory" if batch.parts else "the log has lost it")
            values = self._learner.update(batch.parts)
        except ValueError as error:
            return Update(batch.number, self._taken, reason=str(error))
        return Update(batch.number, self._taken, values)


@contextmanager
def forked_ranks(config: TrainingConfig, run: Callable[[Ranks], object], folder: Path) -> Iterator[Ranks]:
    """This process as rank 0 of `config`; the other ranks are forked from it, meet it in `folder` and do `be`.

    Call it before anything has started a thread. Raises RuntimeError where one of them failed.
    """
    fork, ranks = multiprocessing.get_context("fork"), [Ranks(rank, config.ranks) for rank in range(config.ranks)]
    file = folder / "ranks.json"

    def become(rank: Ranks) -> None:
        join_process_group(file, rank, device=config.device_of(rank.rank))
        run(rank)

    started = [fork.Process(target=become, args=(rank,), daemon=True) for rank in ranks[1:]]
    for process in started:
        process.start()
    join_process_group(file, ranks[0], device=config.device_of(0))
    yield ranks[0]
    for process in started:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"another rank ended with {process.exitcode}")


def folder_digest(folder: Path) -> str:
    """`weights_digest` of the model in `folder`. Raises as `load_model` does."""
    return weights_digest(weight_tensors(load_model(folder)))
