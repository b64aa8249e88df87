"""What the ranks do together between two batches: rank 0 decides when the weights are published, the others join.

Each action begins with an exchange in which rank 0's intention counts. A rank that came to train while rank 0 wants the
weights joins in, then exchanges again; an idle rank learns from the rendezvous' store that it is wanted. So all ranks
call the same collectives in the same order, whatever each of them has read from the log.

A rank that stops says so in an exchange, in which it counts before what rank 0 intends. The others stop at the same
point, so all have the same version and can write a checkpoint of it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, KeysView, Mapping, Sequence
from contextlib import ExitStack
from enum import IntEnum
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from infra.store.layout import Layout
from operators.trainer.background_writer import BackgroundWriter, Write
from operators.trainer.learner_contract import FullWeights
from operators.trainer.rank_services import RankStore
from operators.trainer.rendezvous import Rendezvous, watch_ranks
from operators.trainer.version_file import (
    describe_file,
    gather_in_step,
    layout_of,
    open_file,
    ranks_without_file,
    receive_parts,
    send_parts,
    write_parts,
)
from operators.trainer.weight_parts import WeightPart

_COUNTER, _STOPS, _EXCHANGES = "joint actions", "stops", "exchanges"
_POLL_S = 0.02
_FILE = "version file"


class RanksStop(RuntimeError):
    """A rank stops, so none trains any more; all have the same version."""


class _Action(IntEnum):
    TRAIN = 0
    NOTHING = 1
    WRITE = 2
    """Write the weights, in the rollouts' dtype, into the file of a version."""
    GATHER = 3
    """Gather the weights, in the dtype in which they are trained, on rank 0."""
    STOP = 4


class JointActions:
    """The joint actions of one rank of `rendezvous`: write `rounded` weights, for rollouts, or gather `full` ones.

    The weights are on `device`. For the publisher they are tensors that write themselves (`TensorWriter`). With a
    single rank nothing is exchanged. All methods that join raise RanksStop if another rank stops.
    """

    def __init__(self, rendezvous: Rendezvous, device: torch.device, rounded: FullWeights, full: FullWeights) -> None:
        self._rendezvous, self._store, self._ranks = rendezvous, rendezvous.store, rendezvous.ranks
        self._device, self._clock = device, rendezvous.services.system.monotonic
        self.rounded, self.full = rounded, full
        self._writer = BackgroundWriter(rendezvous, device)
        self._waited = 0.0
        self._taken = 0
        """Actions of rank 0 that this rank has taken part in."""
        self._undecided = False
        """Whether the others wait, after a batch, for rank 0 to publish or not."""
        self._transferred = 0
        """The last publication of which ranks on other machines sent their parts in the background."""
        self._exchanges = 0
        """Exchanges since the first such publication."""
        self.stopped = False
        """Whether the ranks have stopped together: none may train any more."""

    def before_training(self) -> None:
        """Join what rank 0 wants before the next batch. Every rank calls it when it has the batch."""
        self.proceed()
        while self._join(self._exchange(_Action.TRAIN)):
            pass

    def after_training(self) -> None:
        """Wait until rank 0 has decided whether to publish the weights, and join; rank 0 decides by what it calls next:
        `write_to`, `gather` or `proceed`.
        """
        if self._ranks.rank == 0:
            self._undecided = self._ranks.count > 1
        else:
            self._join(self._exchange(_Action.NOTHING))

    def while_idle(self) -> None:
        """Join an action that rank 0 wants now, or a stop. Ranks call it while they have no batch."""
        self._writer.check()
        if self._store is None:
            return
        wanted = self._ranks.rank and self._store.add(_COUNTER, 0) > self._taken
        if wanted or self._store.add(_STOPS, 0):
            self._join(self._exchange(_Action.NOTHING))

    def stop(self) -> None:
        """Stop, with all ranks, at the version that they have now. Waits until each is between two batches."""
        if self._store is not None and not self.stopped:
            self.proceed()
            self._store.add(_STOPS, 1)
            self._exchange(_Action.STOP)

    def keys(self) -> KeysView[str]:
        """The names of the weights."""
        return self.rounded.specs().keys()

    def write_to(self, file: Path, views: Mapping[str, np.ndarray]) -> Callable[[], None]:
        """Begin, on rank 0, to write all ranks' rounded weights into `file`, with the bytes `views` of each tensor.

        The returned call, in any thread, waits until all is written. It raises RankLost if another rank has ended, and
        what writing raised.
        """
        if self._store is not None:
            self._rendezvous.post(_FILE, describe_file(file))
        self._begin(_Action.WRITE)
        self._write(partial(WeightPart.write, views=views), ExitStack())
        return partial(self._writer.wait_for_all, self._taken)

    def wait_until_written(self) -> None:
        """Wait until this rank's weights may change. Raises what writing them raised."""
        began = self._clock()
        self._wait()
        self._waited += self._clock() - began

    def take_waited(self) -> float:
        """Seconds of `wait_until_written` since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def close(self) -> None:
        """Finish this rank's part of what is being written, and wait for no other rank."""
        self._writer.close()

    def gather(self) -> Generator[tuple[str, Tensor]]:
        """Gather the full weights, one tensor at a time, on rank 0, which calls it.

        Closed before its end, it gathers the others, too: the ranks that take part cannot stop halfway.
        """
        self._begin(_Action.GATHER)
        with watch_ranks(self._rendezvous, self._device):
            items = gather_in_step(self.full, self._ranks)
            try:
                for each in items:  # noqa: UP028 - `yield from` would close `items`
                    yield each
            finally:
                for _ in items:
                    pass

    def proceed(self) -> None:
        """Let ranks that wait for a decision continue. Only rank 0 has such ranks."""
        if self._undecided:
            self._undecided = False
            self._exchange(_Action.NOTHING)

    def _begin(self, action: _Action) -> None:
        """Begin `action` on rank 0, and call the others to it."""
        if self._store is not None:
            self._store.add(_COUNTER, 1)
        self._taken += 1
        self._undecided = False
        self._raise_if_stopped(self._exchange(action))

    def _join(self, action: _Action) -> bool:
        """Take part in `action`; whether it is one of rank 0's."""
        self._raise_if_stopped(action)
        if action not in (_Action.WRITE, _Action.GATHER):
            return False
        self._taken += 1
        if action == _Action.GATHER:
            with watch_ranks(self._rendezvous, self._device):
                for _ in gather_in_step(self.full, self._ranks):
                    pass
            return True
        with ExitStack() as opened:
            file = opened.enter_context(open_file(self._rendezvous.posted(_FILE) or "", self._layout))
            write = None if file is None else partial(WeightPart.write_to_file, file=file, places=self._places)
            self._write(write, opened.pop_all())
        return True

    def _write(self, write: Write | None, opened: ExitStack) -> None:
        """Write the parts of all ranks, in the background if each has its parts at hand; then `opened` is closed."""
        self._wait()
        with watch_ranks(self._rendezvous, self._device):
            remote = ranks_without_file(self._ranks, write)
            if self.rounded.at_hand:
                parts = list(self.rounded.parts())
                transfer = self._transfer(parts, write, remote) if remote else None
                own, ignore = parts if write else (), lambda part: None
                self._writer.begin(own, write or ignore, self._taken, opened.close, transfer)
                return
            with opened:
                write_parts(self.rounded, self._ranks, write, remote)
        self._writer.begin((), lambda part: None, self._taken, lambda: None)

    def _transfer(
        self, parts: Sequence[WeightPart], write: Write | None, remote: Sequence[int]
    ) -> Iterable[None] | None:
        """What this rank does so that the parts of the `remote` ranks reach rank 0; nothing on its machine."""
        self._transferred, group = self._taken, self._group
        if self._ranks.rank in remote:
            return send_parts(parts, self._ranks, group)
        if self._ranks.rank == 0:
            assert write is not None
            return receive_parts(parts, self._ranks, group, remote, write)
        return None

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        """A group for the threads that transfer parts: those of updates are in use meanwhile."""
        return self._ranks.open_group([range(self._ranks.count)])

    def _wait(self) -> None:
        """Wait until this rank's weights may change and, since collectives have a timeout, those of the others, too."""
        self._writer.wait()
        self._poll(lambda: self._writer.written_by(0, self._transferred))

    def _poll(self, done: Callable[[], bool]) -> None:
        """Wait until `done`, if parts were transferred. Raises RankLost if another rank has ended."""
        while self._transferred and not done():
            self._rendezvous.check()
            self._writer.check()
            self._rendezvous.services.system.sleep(_POLL_S)

    @cached_property
    def _layout(self) -> Layout:
        return layout_of(self.rounded)

    @cached_property
    def _places(self) -> dict[str, int]:
        return self._layout.places()

    def _exchange(self, action: _Action) -> _Action:
        """Exchange intentions, and return rank 0's, or that any rank stops."""
        if self._transferred and self._store is not None:
            self._exchanges += 1
            if self._ranks.rank == 0:
                self._store.add(_EXCHANGES, 1)
            else:
                self._poll(partial(self._can_exchange, self._store))
        found = [_Action(int(each)) for each in self._ranks.gather(torch.tensor([action]))]
        self.stopped = _Action.STOP in found
        return _Action.STOP if self.stopped else found[0]

    def _can_exchange(self, store: RankStore) -> bool:
        """Whether rank 0 exchanges, or waits no more for parts, which may take longer than a collective may."""
        return store.add(_EXCHANGES, 0) >= self._exchanges or self._writer.written_by(0, self._transferred)

    def _raise_if_stopped(self, action: _Action) -> None:
        if action is _Action.STOP:
            raise RanksStop("another rank stops")
