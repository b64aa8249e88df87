"""Heartbeats of relays, and the order in which placement chains them."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.records.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """A relay worker's heartbeat: the complete and verified versions it holds, newest first, `bytes` in all.

    Written by relay, read by placement. Peers reach it at `address` ("host:port"); `store` is its machine's folder of
    weights. Of the version that is `arriving`, `arrived_bytes` of `arriving_bytes` have arrived. `received` and `sent`
    are bytes since it started, `received_per_s` and `sent_per_s` since the last heartbeat. `corrupted_chunks` counts
    damaged chunks that it requested again, `lost_sources` sources that failed during a transfer. `chain_number` is the
    number of the chain it follows. `unreachable` are addresses of relays to which it could not connect lately.
    """

    relay: int
    versions: tuple[str, ...]
    bytes: int
    host: str
    pid: int
    sent_at: int
    address: str = ""
    store: str = ""
    arriving: PolicyVersion | None = None
    arrived_bytes: int = 0
    arriving_bytes: int = 0
    received: int = 0
    sent: int = 0
    received_per_s: float = 0.0
    sent_per_s: float = 0.0
    corrupted_chunks: int = 0
    lost_sources: int = 0
    chain_number: int = 0
    unreachable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RelayLink:
    """A relay in the chain: its address for peers, and its host name and store, which identify a local relay."""

    relay: int
    address: str
    host: str
    store: str


MAX_NEEDED_VERSIONS = 8
"""Maximum of needed versions in a chain."""


@dataclass(frozen=True, slots=True)
class RelayChain:
    """The order of a run's relays: the first is the master, to which the trainer's versions go.

    Written by placement, read by relay and trainer; the last one in the log is valid. `schedule` (chain, tree,
    binomial) is how a version is broadcast from the master. The relays of `joining` are new or restarted and lack the
    newest version: they pull it from all relays that have it. Evaluation work that waits names the versions in
    `needed`: stores evict them last, in this order.
    """

    number: int
    links: tuple[RelayLink, ...]
    joining: tuple[int, ...]
    schedule: str
    written_at: int
    needed: tuple[PolicyVersion, ...] = ()
