"""The order of the relays: from the live relays and the versions they hold to the chain and its joining relays.

Only placement decides it (design §7). The order is stable: relays that are gone leave it, and new ones are appended.
The master stays while it is alive. If it is gone, or holds no version while another relay does, the first relay with
the newest version replaces it: the relay on the trainer's machine may be the last to send a heartbeat. The functions
are pure; the manager keeps the heartbeats.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from schemas.records import PolicyVersion, RelayChain, RelayLink, RelayStatus

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LiveRelay:
    """A live relay: the `newest` version it holds, whether that is the newest of the run (`complete`), and whether it
    has reported to hold none (`empty`)."""

    link: RelayLink
    newest: PolicyVersion | None
    complete: bool
    empty: bool = False


def plan_chain(
    before: RelayChain | None, alive: Mapping[int, LiveRelay]
) -> tuple[tuple[RelayLink, ...], tuple[int, ...]]:
    """Links and joining relays of the chain after `before`; those of `before` while no relay is alive."""
    known = [] if before is None else [link.relay for link in before.links]
    if not alive:
        return (before.links, before.joining) if before is not None else ((), ())
    stayed = [relay for relay in known if relay in alive]
    new = sorted(alive.keys() - set(stayed))
    joined = {*new, *(before.joining if before is not None else ())}
    order = [*stayed, *new]
    any_version = any(each.newest is not None for each in alive.values())
    master_is_empty = bool(stayed) and alive[stayed[0]].empty and any_version
    if not stayed or stayed[0] != known[0] or master_is_empty:  # no master, or it is gone, or has no version to send
        master = max(order, key=lambda relay: _rank(alive[relay].newest))  # the first of those with the newest version
        order = [master, *(relay for relay in order if relay != master)]
    any_complete = any(each.complete for each in alive.values())
    joining = [relay for relay in order[1:] if relay in joined and any_complete and not alive[relay].complete]
    return tuple(alive[relay].link for relay in order), tuple(joining)


class RelayChainManager:
    """Records heartbeats and decides when to write a new chain. A relay without a heartbeat for `timeout_s` is gone.

    `number` is that of the last chain that placement has committed (None: unknown); a greater number is foreign.
    """

    def __init__(self, timeout_s: float, schedule: str, number: int | None = None) -> None:
        self._timeout_s, self._schedule = timeout_s, schedule
        self.number = number
        self._superseded = False
        """Whether a foreign chain follows the last one of placement in the log."""
        self._heartbeats: dict[int, tuple[RelayStatus | None, float]] = {}
        self._chain: RelayChain | None = None
        self._refused_before: set[int] = set()

    def record_chain(self, chain: RelayChain, now: float) -> bool:
        """Record a chain read from the log; its relays have `timeout_s` to send a heartbeat.

        False if the chain is foreign; the next chain of placement replaces it.
        """
        if self.number is not None and chain.number > self.number:
            self._superseded = True
            return False
        if self._chain is None or chain.number > self._chain.number:  # others are repeated, or contradict it
            self._chain = chain
            for link in chain.links:
                self._heartbeats.setdefault(link.relay, (None, now))
        return True

    def record_heartbeat(self, status: RelayStatus, now: float) -> None:
        """Record a heartbeat; a status without an address has no data plane and is ignored."""
        if status.address:
            self._heartbeats[status.relay] = (status, now)

    def reset_timeouts(self, now: float) -> None:
        """Restart all time-outs, since placement itself was paused."""
        self._heartbeats = {relay: (status, now) for relay, (status, _) in self._heartbeats.items()}

    def next_chain(
        self, now: float, newest: PolicyVersion | None, wall_ms: int, needed: Sequence[PolicyVersion] = ()
    ) -> RelayChain | None:
        """The chain to write now, which names the `needed` versions; None if the last one is unchanged."""
        self._heartbeats = {
            relay: heartbeat for relay, heartbeat in self._heartbeats.items() if now - heartbeat[1] <= self._timeout_s
        }
        before = self._chain
        if self.number is None:  # the first chain of a run, or a commit note without its number
            self.number = 0 if before is None else before.number
        links, joining = plan_chain(before, self._alive(newest))
        if not links:
            return None
        made = RelayChain(
            0 if before is None else before.number, links, joining, self._schedule, wall_ms, tuple(needed)
        )
        if before is not None and replace(before, written_at=wall_ms) == made and not self._superseded:
            return None
        self._superseded = False
        self.number = max(made.number, self.number) + 1
        self._chain = replace(made, number=self.number)
        return self._chain

    def _refused(self) -> set[int]:
        """The relays whose address does not work: another relay reports it, and no bytes have ever left by it.

        Without a place in the chain they still receive, and nobody depends on them.
        """
        statuses = {status.relay: status for status, _ in self._heartbeats.values() if status is not None}
        reported = {address: status for status in statuses.values() for address in status.unreachable}
        refused = {status.relay for status in statuses.values() if status.address in reported and not status.sent}
        if len(refused) == len(self._heartbeats):
            refused = set()
        if refused != self._refused_before:
            self._refused_before = refused
            named = (
                f"relay {each} at {statuses[each].address} (reported by relay {by.relay} of machine {by.host})"
                for each in sorted(refused)
                for by in (reported[statuses[each].address],)
            )
            log.warning("relays without a place in the chain, as others cannot connect: %s", "; ".join(named) or "none")
        return refused

    def _alive(self, newest: PolicyVersion | None) -> dict[int, LiveRelay]:
        refused = self._refused()
        known = {} if self._chain is None else {link.relay: link for link in self._chain.links}
        alive = {}
        for relay, (status, _) in self._heartbeats.items():
            if relay in refused:
                continue
            if status is None:
                if relay in known:  # a relay of an earlier chain alone is not expected any more
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
