"""What a rank of the trainer needs of its process: time, threads, a store for all ranks, and collectives.

The product uses `PROCESS`. A simulation has its own services (`pipelines/simulate/simulated_ranks.py`).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from infra.clocks import wall_ms
from infra.listening import interface_towards, listening_socket
from infra.models.checkpoint_folder import load_tokenizer, write_model
from infra.runners.stopping import STOPPING
from infra.store.weight_store import WeightStore
from infra.system import SYSTEM, System
from operators.trainer.config import LearnerConfig
from operators.trainer.learner_contract import LearnerContract
from operators.trainer.learners import open_learner
from operators.trainer.persist import persist
from operators.trainer.ranks import Ranks
from schemas.records import RankAddress

if TYPE_CHECKING:
    from infra.kafka.producer import BoundedProducer
    from infra.kafka.properties import ClientProperties
    from infra.kafka.role_notes import ReadNotes
    from operators.trainer.rank_addresses import Addresses

T = TypeVar("T")
STORE_TIMEOUT = timedelta(seconds=10)
"""Timeout of a request to the store; those of collectives have the collectives' own."""


class RankStore(Protocol):
    """Values by key, of rank 0, for all ranks: torch's `Store`. Requests raise RuntimeError once rank 0 has ended."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int:
        """Add `amount` to a counter, and return it."""

    def check(self, keys: list[str], /) -> bool:
        """Whether it has all of `keys`."""


class StopRequest(Protocol):
    """Whether this process must stop: a threading.Event."""

    def is_set(self) -> bool: ...

    def wait(self, seconds: float, /) -> bool: ...


class RankServices:
    """The services of a process of the operating system, with torch's store and collectives."""

    system: System = SYSTEM
    stopping: StopRequest = STOPPING
    host: str | None = None
    """The host as relays know it; None: this machine."""
    _joined_by: dist.Store | None = None
    """The store of the process group: that of rank 0 ends with its last reference."""

    def unix_ms(self) -> int:
        return wall_ms()

    def thread_seconds(self) -> float:
        """CPU time of this thread."""
        return time.thread_time()

    def process_seconds(self) -> float:
        """CPU time of this process."""
        return time.process_time()

    def persist(self, action: Callable[[], T], tries: int) -> T:
        """See `persist`: a stop request ends the attempts."""
        return persist(action, tries, self.stopping.wait)

    def weight_store(self, folder: Path, keep: int) -> WeightStore:
        """The store of weight versions in `folder`."""
        return WeightStore(folder, keep)

    def producer(self, client: ClientProperties) -> BoundedProducer:
        """A producer without transactions."""
        from infra.kafka.producer import BoundedProducer  # deferred: replay needs no client of Kafka

        return BoundedProducer(client)

    def addresses(self, client: ClientProperties, run: str) -> Addresses:
        """The addresses of rank 0 of `run`."""
        from operators.trainer.rank_addresses import AddressTopic

        return AddressTopic(client, run, self.role_notes(client, run))

    def role_notes(self, client: ClientProperties, run: str) -> ReadNotes:
        """Reads the commit notes of the roles of `run`."""
        from infra.kafka.note import uncommitted_consumer
        from infra.kafka.role_notes import notes_reader

        return notes_reader(run, lambda: uncommitted_consumer(client))

    def open_learner(self, config: LearnerConfig, model: Path, device: str, ranks: Ranks) -> LearnerContract:
        """See `open_learner`."""
        return open_learner(config, model, device, ranks)

    def write_model(
        self,
        model: PreTrainedModel,
        source: Path,
        specs: Mapping[str, Tensor],
        tensors: Iterable[tuple[str, Tensor]],
        folder: Path,
    ) -> None:
        """Write `tensors`, of `specs`, and the tokenizer of `source` as the Hugging Face folder `folder`.

        Raises OSError, SafetensorError.
        """
        write_model(model, load_tokenizer(source), specs, tensors, folder)

    def open_store(self, host: str, token: str) -> tuple[RankStore, int]:
        """A store that listens on `host` only, and its port; clients name `token`. Raises OSError."""
        listening = listening_socket(host)  # torch's own socket listens on all interfaces
        port = listening.getsockname()[1]
        server = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=STORE_TIMEOUT,
            master_listen_fd=listening.detach(),
        )
        return dist.PrefixStore(token, server), port

    def connect(self, address: RankAddress) -> RankStore:
        """The store at `address`. Raises OSError, OverflowError, RuntimeError."""
        host, port = address.host, address.port
        # torch's client is slow to detect a closed port
        socket.create_connection((host, port), timeout=1.0).close()
        server = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
        return dist.PrefixStore(address.token, server)

    @property
    def has_joined(self) -> bool:
        """Whether this process has joined a process group: it cannot join another one."""
        return dist.is_initialized()

    def join(self, store: RankStore, ranks: Ranks, host: str, device: str) -> Ranks:
        """Join torch's default process group by `store`, towards rank 0 at `host`; returns `ranks` with collectives."""
        assert isinstance(store, dist.Store)
        _bind_collectives(host)
        timeout = timedelta(seconds=ranks.timeout_s)
        # At the first collective on GPUs, ranks wait in their store for the id of rank 0's NCCL communicator.
        self._joined_by, client = store, store.clone()
        client.set_timeout(timeout)
        dist.init_process_group(
            "gloo" if device == "cpu" else f"cpu:gloo,{device.partition(':')[0]}:nccl",
            store=dist.PrefixStore("group", client),
            rank=ranks.rank,
            world_size=ranks.count,
            timeout=timeout,
        )
        return ranks


PROCESS = RankServices()


def _bind_collectives(host: str) -> None:
    """Bind torch's collectives to the network interface towards rank 0, unless the user has set one."""
    interface = interface_towards(host)
    if interface is None:
        raise OSError(
            f"no network interface has a route to rank 0 at {host}: set trainer.rank_0_host, or GLOO_SOCKET_IFNAME"
        )
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, interface)
