"""What relays say of themselves, and in what order placement has them stand."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.records.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """A relay worker's heartbeat: the complete and verified versions it holds, newest first, `bytes` in all.

    Made by relay, eaten by placement. `address` ("host:port") is where peers reach it, `store` its machine's folder of
    weights. Of the version that is `arriving`, `arrived_bytes` of `arriving_bytes` are there. `received` and `sent` are
    bytes since it started, `received_per_s` and `sent_per_s` since the heartbeat before; `corrupted` counts damaged
    chunks that were asked for again, `lost` sources that were lost under way; `chain` is the number it obeys.
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
    corrupted: int = 0
    lost: int = 0
    chain: int = 0


@dataclass(frozen=True, slots=True)
class RelayLink:
    """A relay in the chain: where peers reach it; its machine's name and store, by which a trainer knows its own."""

    relay: int
    address: str
    host: str
    store: str


@dataclass(frozen=True, slots=True)
class RelayChain:
    """In what order the relays of a run stand: the first is the master, to which the trainer's versions go.

    Made by placement, eaten by relay and trainer; the last one in the log counts. `schedule` (chain, tree, binomial)
    says how a version goes from the master to the others. Those of `joining` are new, or back, and lack the newest
    version: they pull it from all that have it.
    """

    number: int
    links: tuple[RelayLink, ...]
    joining: tuple[int, ...]
    schedule: str
    written_at: int
