"""In what order relays stand: from the live ones and what they hold to the chain, and who is new in it. Pure but for
the keeper, which remembers heartbeats.

Placement alone decides it (design §7). An order once found stays: relays that are gone leave it, new ones come last.
The master stays while it lives; when it is gone, or has nothing while another has something, the first that is complete
takes its place: the relay beside the trainer may be the last to be heard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from schemas.records import PolicyVersion, RelayChain, RelayLink, RelayStatus


@dataclass(frozen=True, slots=True)
class LiveRelay:
    """A relay that is alive; `newest` is the newest version that it holds, `complete` whether that is the run's,
    `empty` whether it has said to hold none."""

    link: RelayLink
    newest: PolicyVersion | None
    complete: bool
    empty: bool = False


def chain_of(
    before: RelayChain | None, alive: Mapping[int, LiveRelay]
) -> tuple[tuple[RelayLink, ...], tuple[int, ...]]:
    """Links and joining of the chain that follows `before`; `before`'s own while nobody is alive."""
    known = [] if before is None else [link.relay for link in before.links]
    if not alive:
        return (before.links, before.joining) if before is not None else ((), ())
    stayed = [relay for relay in known if relay in alive]
    new = sorted(alive.keys() - set(stayed))
    joined = {*new, *(before.joining if before is not None else ())}
    order = [*stayed, *new]
    idle = bool(stayed) and alive[stayed[0]].empty and any(each.newest is not None for each in alive.values())
    if not stayed or stayed[0] != known[0] or idle:  # there is no master, it is gone, or it has nothing to hand out
        master = max(order, key=lambda relay: _rank(alive[relay].newest))  # the first of the best
        order = [master, *(relay for relay in order if relay != master)]
    someone = any(each.complete for each in alive.values())
    joining = [relay for relay in order[1:] if relay in joined and someone and not alive[relay].complete]
    return tuple(alive[relay].link for relay in order), tuple(joining)


class RelayChainKeeper:
    """Hears heartbeats and says when a new chain is due. A relay that is silent for `timeout_s` seconds is gone.

    `number` is that of the last chain that placement has committed; None: not known. Any beyond is of someone else.
    """

    def __init__(self, timeout_s: float, schedule: str, number: int | None = None) -> None:
        self._timeout_s, self._schedule = timeout_s, schedule
        self.number = number
        self._superseded = False
        """Whether someone else's chain stands in the log after the last of placement."""
        self._heard: dict[int, tuple[RelayStatus | None, float]] = {}
        self._chain: RelayChain | None = None

    def learn(self, chain: RelayChain, now: float) -> bool:
        """This chain is in the log; who stands in it has a time-out's time to be heard of.

        False: it is of someone else, and the next one of placement takes its place.
        """
        if self.number is not None and chain.number > self.number:
            self._superseded = True
            return False
        if self._chain is None or chain.number > self._chain.number:
            self._chain = chain
        for link in chain.links:
            self._heard.setdefault(link.relay, (None, now))
        return True

    def hear(self, status: RelayStatus, now: float) -> None:
        """A heartbeat came; one without an address is of no data plane."""
        if status.address:
            self._heard[status.relay] = (status, now)

    def forgive(self, now: float) -> None:
        """Start every time-out anew: it was placement itself that paused."""
        self._heard = {relay: (status, now) for relay, (status, _) in self._heard.items()}

    def decide(self, now: float, newest: PolicyVersion | None, wall_ms: int) -> RelayChain | None:
        """The chain that must be written now, None while the last one stands."""
        self._heard = {relay: heard for relay, heard in self._heard.items() if now - heard[1] <= self._timeout_s}
        before = self._chain
        if self.number is None:  # the first decision of a run, or a note that does not name the last one
            self.number = 0 if before is None else before.number
        links, joining = chain_of(before, self._alive(newest))
        if not links:
            return None
        made = RelayChain(0 if before is None else before.number, links, joining, self._schedule, wall_ms)
        if before is not None and replace(before, written_at=wall_ms) == made and not self._superseded:
            return None
        self._superseded = False
        self.number = max(made.number, self.number) + 1
        self._chain = replace(made, number=self.number)
        return self._chain

    def _alive(self, newest: PolicyVersion | None) -> dict[int, LiveRelay]:
        known = {} if self._chain is None else {link.relay: link for link in self._chain.links}
        alive = {}
        for relay, (status, _) in self._heard.items():
            if status is None:
                alive[relay] = LiveRelay(known[relay], None, False)
                continue
            held = max(map(PolicyVersion.parse, status.versions), default=None)
            link = RelayLink(relay, status.address, status.host, status.store)
            alive[relay] = LiveRelay(
                link, held, held is not None and newest is not None and held >= newest, held is None
            )
        return alive


def _rank(version: PolicyVersion | None) -> tuple[int, int]:
    return (-1, -1) if version is None else (version.epoch, version.number)
