"""Replays training from a log of batches, outside a run: with the same configuration or a changed one."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from infra.kafka.role_notes import NO_NOTES, ReadNotes
from infra.models.checkpoint_folder import load_model, load_tokenizer, write_model
from infra.models.device_copies import use_device
from infra.models.weights import WeightsDigest, weight_tensors, weights_digest
from operators.trainer.assembly import BatchAssembly, WholeBatch, empty_reason
from operators.trainer.checkpoint_files import (
    StoredState,
    TrainerPosition,
    on_all_ranks,
    write_manifest,
    write_rank_file,
)
from operators.trainer.learners import open_learner
from operators.trainer.missing_batch import batches_made
from operators.trainer.rank_addresses import AddressFile
from operators.trainer.rank_layouts import gather_files, gather_offsets
from operators.trainer.ranks import ALONE, Ranks
from operators.trainer.rendezvous import Rendezvous, join_process_group
from operators.trainer.training_config import TrainingConfig
from schemas.records import MicroBatch, PolicyVersion


@dataclass(frozen=True, slots=True)
class Update:
    """One batch. If it could not be trained, `reason` says why and `values` is empty.

    `step` counts the batches so far: each makes a version.
    """

    batch: int
    step: int
    values: dict[str, float] = field(default_factory=dict)
    reason: str | None = None


class Replay:
    """Trains `model` from a log. The same batches and configuration reproduce the run's weights bit by bit.

    This process is one of `ranks`, those of the configuration. Each share of a batch has `divisions` parts (see
    BufferLayout). Training begins with `checkpoint`, which a trimmed log needs, or with the model. `notes` reads the
    commit notes of the run. Raises CheckpointError if the checkpoint cannot be read, ValueError for what the learner
    refuses.
    """

    def __init__(
        self,
        config: TrainingConfig,
        model: Path,
        ranks: Ranks = ALONE,
        divisions: int = 1,
        checkpoint: Path | None = None,
        notes: ReadNotes = NO_NOTES,
    ) -> None:
        torch.set_num_threads(config.threads)
        self._model, self._ranks, self._config, self._divisions, self._notes = model, ranks, config, divisions, notes
        device = config.device_of(ranks.rank)
        use_device(device)
        self._learner = open_learner(config.learner, model, device, ranks)
        self._batches_taken, self._starts = 0, dict.fromkeys(config.partitions_of(ranks.rank, divisions), 0)
        if checkpoint is not None:
            with StoredState(checkpoint) as stored:
                on_all_ranks(ranks, partial(stored.verify, ranks), f"the checkpoint {checkpoint}")
                self._learner.restore(stored)
            position = stored.position
            self._batches_taken = position.version.number
            self._starts = {partition: position.batch_offsets[partition] for partition in self._starts}
        self.rejected = 0
        """Number of parts rejected, by the rules of the run (see `BatchAssembly`)."""

    def train(self, parts: Iterable[tuple[MicroBatch, int, int]], limit: int | None = None) -> Iterator[Update]:
        """Train the batches of `parts`, given with partition and offset, up to batch number `limit`.

        Batches are accepted and skipped as in a run. Raises MissingBatch if the log has lost the next one.
        """
        if limit is not None and self._batches_taken >= limit:
            return
        assembly = BatchAssembly(
            self._starts,
            divisions=self._divisions,
            first=self._batches_taken,
            lost=self._config.lost_batches,
            starts=self._starts.values(),
        )
        for batch in self._complete_batches(assembly, parts):
            yield self._update(batch)
            if self._batches_taken == limit:
                return
        missing = assembly.missing()
        if missing is not None and (batches_made(self._notes) or 0) > missing.number:
            raise missing

    def save_state(self, folder: Path) -> None:
        """Write a checkpoint of the state, with which a replay by any number of ranks can begin, to the new `folder`.

        A collective: every rank must call it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        state = self._learner.state()
        offsets = gather_offsets(self._ranks, list(self._starts), list(self._starts.values()))
        position = TrainerPosition(PolicyVersion(0, self._batches_taken), offsets, 0)
        files = gather_files(self._ranks, write_rank_file(folder, state, self._ranks))
        if self._ranks.rank == 0:
            write_manifest(folder, state, position, files)

    def save(self, folder: Path) -> str:
        """Write the model to the new folder `folder`, on rank 0, and return the `weights_digest` of its weights.

        A collective: every rank must call it. Raises FileExistsError if `folder` exists.
        """
        weights, digest = self._learner.weights(), WeightsDigest()
        tensors = digest.added(weights.items())
        if self._ranks.rank == 0:
            write_model(self._learner.model, load_tokenizer(self._model), weights.specs(), tensors, folder)
        else:
            for _ in tensors:
                pass
        return digest.hexdigest()

    def _complete_batches(
        self, assembly: BatchAssembly, parts: Iterable[tuple[MicroBatch, int, int]]
    ) -> Iterator[WholeBatch]:
        starts = self._starts  # where reading begins: each batch moves them
        yield from assembly.take()
        for part, partition, offset in parts:
            if offset >= starts.get(partition, offset + 1):
                yield from assembly.add(part, partition, offset)
                self.rejected += len(assembly.rejected)
                assembly.rejected.clear()

    def _update(self, batch: WholeBatch) -> Update:
        self._batches_taken += 1
        self._starts = dict(zip(self._starts, batch.next_offsets, strict=True))
        try:
            rows = sum(len(part.trajectory_ids) for part in batch.parts)
            if not sum(self._ranks.total([float(rows)])):
                raise ValueError(empty_reason(batch.parts))
            values = self._learner.update(batch.parts)
        except ValueError as error:
            return Update(batch.number, self._batches_taken, reason=str(error))
        return Update(batch.number, self._batches_taken, values)


@contextmanager
def forked_ranks(config: TrainingConfig, run: Callable[[Rendezvous], object], folder: Path) -> Iterator[Rendezvous]:
    """Make this process rank 0 of `config`, and fork the other ranks, which rendezvous in `folder` and call `run`.

    Yields rank 0's rendezvous. Call it before any thread is started. Raises RuntimeError if one of them failed.
    """
    fork = multiprocessing.get_context("fork")
    ranks = [Ranks.of(config, rank) for rank in range(config.ranks)]
    addresses = AddressFile(folder / "ranks.json")

    def run_rank(rank: Ranks) -> None:
        run(join_process_group(addresses, rank, device=config.device_of(rank.rank)))

    processes = [fork.Process(target=run_rank, args=(rank,), daemon=True) for rank in ranks[1:]]
    for process in processes:
        process.start()
    yield join_process_group(addresses, ranks[0], device=config.device_of(0))
    for process in processes:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"another rank ended with exit code {process.exitcode}")


def folder_distance(folder: Path, reference: Path) -> float:
    """The 2-norm of the difference of two models' weights, relative to that of the weights in `reference`."""
    one, other = weight_tensors(load_model(folder)), weight_tensors(load_model(reference))
    differences = sum(float((one[name].double() - tensor.double()).square().sum()) for name, tensor in other.items())
    return math.sqrt(differences / sum(float(tensor.double().square().sum()) for tensor in other.values()))


def folder_digest(folder: Path) -> str:
    """`weights_digest` of the model in `folder`. Raises as `load_model` does."""
    return weights_digest(weight_tensors(load_model(folder)))
