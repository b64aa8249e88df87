"""Rendezvous of the trainer's ranks, and detection of a failed rank.

Rank 0 opens a store (torch's, over TCP) and publishes its address; the other ranks read it (`rank_addresses.py`). A
rendezvous is for one set of processes: each rank registers once, and all begin together. A restarted rank registers
again, which signals the failure: all processes of the rendezvous end, and their successors start a new one.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from infra.models.device_copies import use_device
from infra.system import Event
from operators.trainer.assembly import CannotTrain
from operators.trainer.rank_lost import RankLost
from operators.trainer.rank_services import PROCESS, RankServices, RankStore
from operators.trainer.ranks import ALONE, Ranks
from schemas.records import RankAddress

if TYPE_CHECKING:
    from operators.trainer.rank_addresses import Addresses  # which needs Kafka's client

log = logging.getLogger(__name__)

FIRST_WARNING_S, WARNING_S = 30.0, 60.0
"""A rank that waits for others warns after so long, and then as often."""
_OPEN = "open"
"""The key of an open store; its value is the store's address."""
_WEIGHTS = "weights"
"""The key of the note of rank 0's weights. It is in no record, so that ranks of older releases, which lack it, join."""
STOP_WAIT_S = 20.0
"""How long a rank that stops waits for what the others write."""
_POLL_S = 0.02
_WATCH_S = 1.0
_COLLECTIVE_FAILURES = ("gloo/", "Gloo", "NCCL")
"""What the messages of failed collectives contain, which have no class of their own."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The processes that shard one model, this one as one of `ranks`. A single rank has no store."""

    ranks: Ranks = ALONE
    store: RankStore | None = field(default=None, repr=False)
    services: RankServices = field(default=PROCESS, repr=False)
    """Those of this process."""

    def check(self) -> None:
        """Raise RankLost if another process of the rendezvous is known to have ended. Cheap; called while idle."""
        if self.store is None or self.services.stopping.is_set():
            return
        try:
            rejoins = self.store.add("rejoins", 0)
        except RuntimeError as error:
            raise RankLost("rank 0 has ended: its store does not answer") from error
        if rejoins:
            raise RankLost("another rank has restarted and registered again")

    def post(self, key: str, note: str) -> None:
        """Post `note` for the other ranks."""
        if self.store is not None:
            self.store.set(f"note {key}", note)

    def posted(self, key: str) -> str | None:
        """The note that a rank has posted under `key`, None if there is none yet. Raises RankLost without rank 0."""
        name = f"note {key}"
        if self.store is None:
            return None
        try:
            return self.store.get(name).decode() if self.store.check([name]) else None
        except RuntimeError as error:
            raise RankLost("rank 0 has ended: its store does not answer") from error


def notes_of_others(
    rendezvous: Rendezvous, key: Callable[[int], str], closed: Event, enough: Callable[[str], bool]
) -> Iterator[tuple[int, str | None]]:
    """Each rank after 0 with its note under `key(rank)`, once that is posted and `enough`.

    The note is None if `closed` is set first, or if this process has been stopping for `STOP_WAIT_S`. Raises RankLost,
    also after `timeout_s` of the ranks.
    """
    services, stopping_since = rendezvous.services, float("inf")
    deadline = services.system.monotonic() + rendezvous.ranks.timeout_s  # one that has left for a successor is silent
    for rank in range(1, rendezvous.ranks.count):
        while (note := rendezvous.posted(key(rank))) is None or not enough(note):
            now = services.system.monotonic()
            if now > deadline:
                timeout = f"{rendezvous.ranks.timeout_s:g} s (trainer.collective_timeout_s)"
                raise RankLost(f"rank {rank} has not written its part within {timeout}")
            if services.stopping.is_set():
                stopping_since = min(stopping_since, now)
            if closed.wait(_POLL_S) or now - stopping_since > STOP_WAIT_S:
                note = None
                break
            rendezvous.check()
        yield rank, note


@contextmanager
def watch_ranks(rendezvous: Rendezvous, device: torch.device) -> Iterator[None]:
    """In this context, for work on a GPU: end this process once another one of `rendezvous` has ended.

    Gloo fails then. NCCL waits, until `collective_timeout_s` at most, in a call that nothing can interrupt.
    """
    if rendezvous.store is None or device.type != "cuda":
        yield
        return
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_WATCH_S):
            try:
                rendezvous.check()
            except RankLost as lost:
                if not done.is_set():
                    log.error("%s. This process ends: its successor starts again from the newest checkpoint", lost)
                    os._exit(1)

    threading.Thread(target=watch, name="watch ranks", daemon=True).start()
    try:
        yield
    finally:
        done.set()


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Raise RankLost for a collective that fails in this context: another rank has ended, or hangs.

    Failures of NCCL that no call reports end the process instead (TORCH_NCCL_ASYNC_ERROR_HANDLING; `watch_ranks`), with
    the same effect: its successor registers again.
    """
    try:
        yield
    except dist.DistError as error:
        raise RankLost(_describe_failure(error)) from error
    except RuntimeError as error:
        if not any(mark in str(error) for mark in _COLLECTIVE_FAILURES):
            raise
        raise RankLost(_describe_failure(error)) from error


def _describe_failure(error: RuntimeError) -> str:
    return (
        "another rank has ended, or has not answered within trainer.collective_timeout_s: "
        f"{_first_line(error)}. All ranks start again from the newest checkpoint"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def join_process_group(
    addresses: Addresses,
    ranks: Ranks,
    host: str = "127.0.0.1",
    device: str = "cpu",
    model: str = "",
    settings: tuple[str, ...] = (),
    services: RankServices = PROCESS,
    start: int = 0,
    weights: str = "",
) -> Rendezvous:
    """Wait for all of `ranks` and join torch's default process group, for a model on `device`.

    The ranks find rank 0 by `addresses`, the latest if several of its starts, of numbers `start`, are alive; `host` is
    the address of its machine, `model` the model's fingerprint, `settings` what else must be the same on all ranks,
    "name=value" each, and `weights` a word that identifies the weights and where they are. A collective fails after
    `ranks.timeout_s` seconds (see `lost_ranks`). Raises RankLost if this process has joined a process group before, or
    is stopped while it waits; CannotTrain if rank 0 has other ranks, another model, other weights or other settings.
    """
    use_device(device)
    if ranks.count == 1:
        return Rendezvous(services=services)
    if services.has_joined:
        raise RankLost("this process has been a rank before: a new process must take its place")
    rendezvous = wait_for_ranks(addresses, ranks, host, model, settings, services, start, weights)
    assert rendezvous.store is not None
    with lost_ranks():
        joined = services.join(rendezvous.store, ranks, host, device)
    log.info("rank %d of %d has joined the process group", ranks.rank, ranks.count)
    return replace(rendezvous, ranks=joined)


def wait_for_ranks(
    addresses: Addresses,
    ranks: Ranks,
    host: str = "127.0.0.1",
    model: str = "",
    settings: tuple[str, ...] = (),
    services: RankServices = PROCESS,
    start: int = 0,
    weights: str = "",
) -> Rendezvous:
    """Register this rank and wait until all are registered; the first half of `join_process_group`."""
    own = RankAddress(host, 0, "", ranks.count, ranks.shards, model, 0, settings)
    waiting = _Waiting(ranks.rank, services)
    with closing(addresses):
        while True:
            found = (
                _find(addresses, ranks.rank, own, services, weights)
                if ranks.rank
                else _open_store(addresses, own, services, start, weights)
            )
            if isinstance(found, str):
                waiting.warn_if_due(partial("rank 0, but {}".format, found))
            elif _wait_for_all(found, ranks, waiting):
                return Rendezvous(ranks, found, services)
            waiting.pause()


class _Waiting:
    """How `rank` waits: in short pauses, with warnings after `FIRST_WARNING_S`, then every `WARNING_S`."""

    def __init__(self, rank: int, services: RankServices = PROCESS) -> None:
        self._rank, self._services = rank, services
        self._due = services.system.monotonic() + FIRST_WARNING_S

    def warn_if_due(self, text: Callable[[], str]) -> None:
        """Log `text` if it is time to."""
        now = self._services.system.monotonic()
        if now >= self._due:
            self._due = now + WARNING_S
            log.warning("rank %d waits for %s", self._rank, text())

    def pause(self) -> None:
        """Wait a moment. Raises RankLost if this process is stopping."""
        if self._services.stopping.is_set():
            raise RankLost("this process is stopping before all ranks have registered")
        self._services.system.sleep(_POLL_S)


def _open_store(
    addresses: Addresses, own: RankAddress, services: RankServices, start: int, weights: str = ""
) -> RankStore:
    """Open a store that listens on the host of `own` only, and publish its address."""
    host, token = own.host, services.system.secret_name()
    try:
        store, port = services.open_store(host, token)
    except OSError as error:
        text = f"rank 0 cannot listen at {host}: {error}. Set trainer.rank_0_host to an address of this machine"
        raise OSError(text) from error
    store.set(_WEIGHTS, weights)
    store.set(_OPEN, f"{host}:{port}")
    addresses.write(replace(own, port=port, token=token, written_at=services.unix_ms()), start)
    return store


def _find(
    addresses: Addresses, rank: int, own: RankAddress, services: RankServices = PROCESS, weights: str = ""
) -> RankStore | str:
    """Register in the store of rank 0, and return it; why that is not possible yet, if it is not.

    Raises CannotTrain if rank 0 has other ranks, another model, other weights or other settings.
    """
    address = addresses.newest()
    if address is None:
        return "it has not published its address in this run: start it"
    where = f"{address.host}:{address.port}"
    try:
        store = services.connect(address)
        is_open = store.check([_OPEN])
        of_rank_0 = store.get(_WEIGHTS).decode() if store.check([_WEIGHTS]) else ""
    except (OSError, OverflowError, RuntimeError) as error:
        return (
            f"{where} cannot be reached from {platform.node()}: {_first_line(error)}. Start rank 0, or set "
            "trainer.rank_0_host to an address of its machine that all machines with ranks can reach"
        )
    if not is_open:
        return f"{where}, its last address, is of another program: start rank 0"
    _check_address(address, rank, own)
    _check_weights(of_rank_0, rank, weights)
    try:
        if store.add(f"rank {rank}", 1) == 1:
            return store
        store.add("rejoins", 1)
    except RuntimeError as error:
        return f"its store at {where} has ended: {_first_line(error)}"
    return f"a process was rank {rank} of its store at {where} before: it opens another one"


def _check_address(address: RankAddress, rank: int, own: RankAddress) -> None:
    """Raise CannotTrain unless rank 0, at `address`, has the same ranks, model and settings as `own`."""
    theirs, ours = (_in_common(each) for each in (address, own))
    for name in theirs | ours:
        there, here = (each.get(name, "(not set)") for each in (theirs, ours))
        if here != there:
            raise CannotTrain(
                f"rank 0 at {address.host} has {name} {there}, rank {rank} has {here}: start all ranks with the "
                "same configuration and the same model folder"
            )


def _check_weights(theirs: str, rank: int, ours: str) -> None:
    """Raise CannotTrain if the notes `theirs` of rank 0 and `ours` are of different weights."""
    (there, their_place), (here, our_place) = (each.partition(" ")[::2] for each in (theirs, ours))
    if there and here and there != here:
        raise CannotTrain(
            f"rank {rank} has other weights in {our_place} than rank 0 in {their_place}, under the same names: start "
            "all ranks with the same model folder"
        )


def _in_common(address: RankAddress) -> dict[str, str]:
    """What all ranks must have in common, by name."""
    fixed = {"trainer.ranks": str(address.ranks), "trainer.shard_ranks": str(address.shard_ranks)}
    return fixed | {"a model": address.model} | dict(each.split("=", 1) for each in address.settings if "=" in each)


def _wait_for_all(store: RankStore, ranks: Ranks, waiting: _Waiting) -> bool:
    """Wait until every rank has registered; False if one of them has failed meanwhile.

    A rank that has registered may have ended before the last one does. So once all have, each confirms that it still
    waits. Rank 0 alone decides: it opens another store if a rank registers again.
    """
    others = range(1, ranks.count)

    def missing(state: str = "rank") -> str:
        numbers = ", ".join(str(rank) for rank in others if not store.check([f"{state} {rank}"]))
        where = store.get(_OPEN).decode()
        return (
            f"ranks {numbers} to register with rank 0 at {where}: start them; those that run and cannot reach this "
            "address name the reason in their logs (trainer.rank_0_host)"
        )

    try:
        if ranks.rank:
            _wait_for_keys(store, ["confirm"], waiting, missing)
            store.set(f"confirmed {ranks.rank}", "")
            _wait_for_keys(store, ["begin"], waiting, partial(missing, "confirmed"))
            return True
        for decision, state in (("confirm", "rank"), ("begin", "confirmed")):
            keys = [f"{state} {rank}" for rank in others]
            if not _wait_for_keys(store, keys, waiting, partial(missing, state), until_rejoin=True):
                return False
            store.set(decision, "")
    except RuntimeError:
        return False  # rank 0 has ended, or has opened another store
    return True


def _wait_for_keys(
    store: RankStore,
    keys: list[str],
    waiting: _Waiting,
    missing: Callable[[], str],
    *,
    until_rejoin: bool = False,
) -> bool:
    """Wait until `store` has `keys`; with `until_rejoin` False as soon as a rank registers again."""
    while not store.check(keys):
        if until_rejoin and store.add("rejoins", 0):
            return False
        waiting.warn_if_due(missing)
        waiting.pause()
    return True
