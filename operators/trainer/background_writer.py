"""Writes this rank's weights into the file of a version while the next update computes its gradients.

Weights change only in an optimizer step, so nothing is copied first: the threads read the learner's own tensors, and
the step waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from infra.models.device_copies import synchronize, use_own_stream
from operators.trainer.rank_lost import RankLost
from operators.trainer.rendezvous import Rendezvous, lost_ranks, notes_of_others
from operators.trainer.weight_parts import WeightPart, groups_of, on_host

Write = Callable[[WeightPart], None]

_THREADS = {"cuda": 4}
"""Threads that write: one alone copies from pinned to shared memory slower than a GPU sends. On a CPU it is one.

They take few steps, of many bytes each: the trainer's thread launches kernels meanwhile, and waits for Python's lock
after each step of theirs.
"""


class BackgroundWriter:
    """The threads of one rank of `rendezvous`, whose weights are on `device`."""

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        self._rendezvous, self._device = rendezvous, device
        self._count = _THREADS.get(device.type, 1)
        system = rendezvous.services.system
        self._threads = system.pool(self._count, "write weights", partial(use_own_stream, device))
        self._writing: Future[None] | None = None
        self._closed = system.event()

    def begin(
        self,
        parts: Sequence[WeightPart],
        write: Write,
        number: int,
        close: Callable[[], None],
        transfer: Iterable[None] | None = None,
    ) -> None:
        """Begin to `write` this rank's `parts` of publication `number`, and call `close` once that has ended.

        Each step of `transfer` sends a message to another rank or receives some; it stops early at `close`.
        """
        synchronize(self._device)  # the threads' streams do not wait for the last step
        left, lock = groups_of(parts), threading.Lock()

        def write_some() -> None:
            while True:
                with lock:
                    group = next(left, None)
                if group is None:
                    return
                for part in on_host(group):
                    write(part)

        each = [] if transfer is None else [self._threads.submit(self._transfer, transfer)]
        each += [self._threads.submit(write_some) for _ in range(self._count)]
        self._writing = self._threads.submit(self._end, each, number, close)

    def wait(self) -> None:
        """Wait until the weights may change. Raises what `write` raised, RankLost if a transfer has failed."""
        if self._writing is not None:
            self._threads.result(self._writing)

    def check(self) -> None:
        """Raise what `write` raised. Does not wait."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    def wait_for_all(self, number: int) -> None:
        """Wait, on rank 0, until every rank has written publication `number`. Raises RankLost if one has ended."""
        self.wait()
        for rank, note in notes_of_others(self._rendezvous, _note, self._closed, lambda note: int(note) >= number):
            if note is None:
                raise RankLost(f"rank {rank} has not written its part of a version: this rank stops")

    def close(self) -> None:
        """Stop waiting for other ranks: a version that is not written stays so."""
        self._closed.set()
        self._threads.shutdown(wait=True)

    def _transfer(self, transfer: Iterable[None]) -> None:
        with lost_ranks():
            for _ in transfer:
                if self._closed.wait(0):
                    raise RankLost("this rank stops before all parts of a version are transferred")

    def _end(self, each: Sequence[Future[None]], number: int, close: Callable[[], None]) -> None:
        try:
            for writer in each:
                self._threads.wait(writer, None)
        finally:
            close()
        for writer in each:
            writer.result()
        self._rendezvous.post(_note(self._rendezvous.ranks.rank), str(number))

    def written_by(self, rank: int, number: int) -> bool:
        """Whether `rank` has written publication `number`. Raises RankLost if rank 0 has ended."""
        note = self._rendezvous.posted(_note(rank))
        return note is not None and int(note) >= number


def _note(rank: int) -> str:
    """The key under which `rank` posts the number of the last publication that it has written."""
    return f"written by rank {rank}"
