"""How the ranks of a trainer find each other, and notice that one of them is gone.

Rank 0 opens a store (torch's, over TCP) and writes to a file where it is; the others read it there. A meeting is for
one set of processes: each rank registers once, and all begin together. Who comes later is another process in the place
of one that has died; it knocks, so all of the meeting end, and those that take their places meet anew.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from infra.files import write_atomically
from infra.listening import interface_towards, listening_socket
from infra.runners.stopping import STOPPING
from operators.trainer.ranks import ALONE, Ranks

log = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""How long ranks wait for each other in the middle of a step. Who dies is noticed at once; this is for who hangs."""
STORE_TIMEOUT = timedelta(seconds=10)
_POLL_S = 0.02


class RankLost(RuntimeError):
    """A process of the meeting is gone: this one must end, too."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The processes that hold one model together, this one as one of `ranks`. Alone there is nothing to notice."""

    ranks: Ranks = ALONE
    store: dist.Store | None = field(default=None, repr=False)

    def check(self) -> None:
        """Raise RankLost where another process of the meeting is known to be gone. Cheap: for idle moments."""
        if self.store is None or STOPPING.is_set():
            return
        try:
            knocks = self.store.add("knocks", 0)
        except RuntimeError as error:
            raise RankLost("rank 0 is gone") from error
        if knocks:
            raise RankLost("another process has come in the place of a rank")


def join_process_group(file: Path, ranks: Ranks, host: str = "127.0.0.1", device: str = "cpu") -> Rendezvous:
    """Wait for all of `ranks`, and be one of them in torch's default process group, with its model on `device`.

    `file` is where rank 0 says where it is, to be seen by all; `host` is the address of its machine. Raises RankLost
    where this process has been in a meeting before, or is asked to stop while it waits.
    """
    if ranks.count == 1:
        return Rendezvous()
    if dist.is_initialized():
        raise RankLost("a process can be a rank once: another must take its place")
    rendezvous = wait_for_ranks(file, ranks, host)
    assert rendezvous.store is not None
    _bind_collectives(host)
    dist.init_process_group(
        "gloo" if device == "cpu" else f"cpu:gloo,{device.partition(':')[0]}:nccl",
        store=dist.PrefixStore("group", rendezvous.store),
        rank=ranks.rank,
        world_size=ranks.count,
        timeout=COLLECTIVE_TIMEOUT,
    )
    log.info("rank %d of %d has met the others", ranks.rank, ranks.count)
    return rendezvous


def wait_for_ranks(file: Path, ranks: Ranks, host: str = "127.0.0.1") -> Rendezvous:
    """The first half of `join_process_group`: all are there, and have no process group yet."""
    while True:
        store = _open_store(file, host) if ranks.rank == 0 else _register(file, ranks.rank)
        if store is not None and _wait_for_all(store, ranks):
            return Rendezvous(ranks, store)
        _pause()


def _open_store(file: Path, host: str) -> dist.Store:
    """A new store, whose place is in `file` from now on; it listens at `host` alone."""
    listening = listening_socket(host)  # torch's own listens on all interfaces, whatever the host
    port = listening.getsockname()[1]
    server = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT, master_listen_fd=listening.detach()
    )
    token = uuid.uuid4().hex
    store = dist.PrefixStore(token, server)
    store.set("open", token)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps({"host": host, "port": server.port, "token": token}))
    return store


def _bind_collectives(host: str) -> None:
    """Have torch's collectives listen on the interface by which ranks reach rank 0, unless the user has named one."""
    interface = interface_towards(host)
    if interface is None:
        raise OSError(f"no network interface leads to rank 0 at {host}: set trainer.rank_0_host, or GLOO_SOCKET_IFNAME")
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, interface)


def _register(file: Path, rank: int) -> dist.Store | None:
    """The store that `file` tells of, if it is there and nobody has registered as `rank` yet."""
    try:
        told = json.loads(file.read_text("utf-8"))
        place = told["host"], told["port"]
        socket.create_connection(place, timeout=1.0).close()  # torch's client is slow to see that nobody listens
        server = dist.TCPStore(*place, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
        store = dist.PrefixStore(told["token"], server)
        if not store.check(["open"]):
            return None  # somebody else's, at the port of one that is gone
        if store.add(f"rank {rank}", 1) == 1:
            return store
        store.add("knocks", 1)
    except (OSError, RuntimeError):
        pass  # not yet, or no more
    return None


def _wait_for_all(store: dist.Store, ranks: Ranks) -> bool:
    """Wait until every rank has registered; False where one of them has died meanwhile."""
    others = [f"rank {rank}" for rank in range(1, ranks.count)]
    try:
        while not store.check(others if ranks.rank == 0 else ["begin"]):
            if store.add("knocks", 0):
                return False
            _pause()
        if ranks.rank == 0:
            store.set("begin", "")
    except RuntimeError:
        return False  # rank 0 has died
    return True


def _pause() -> None:
    if STOPPING.is_set():
        raise RankLost("asked to stop before all ranks had met")
    time.sleep(_POLL_S)
