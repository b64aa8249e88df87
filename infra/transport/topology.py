"""From the chain that placement wrote to what one relay does: whom it pulls from, and who steps in. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from infra.transport.schedules import Pull, pulls_of
from schemas.records import RelayChain, RelayLink

OFFERED = -1
"""Stands for a connection over which a trainer offers its version to the master."""


@dataclass(frozen=True)
class Upstream:
    """What a relay pulls from whom, and in which order others step in; those of `patient` may make it wait."""

    plan: tuple[Pull, ...]
    others: tuple[int, ...]
    patient: frozenset[int]


def upstream_of(chain: RelayChain, relay: int, chunks: int) -> Upstream:
    """What `relay` does to get `chunks` chunks.

    The master waits for nobody but a trainer that offers. Others pull along the schedule from those before them, and
    wait only for these, so that no two wait for each other. Who is new pulls from all that are complete at once. A
    relay that the chain does not know asks the last one first.
    """
    order = [link.relay for link in chain.links]
    settled = [each for each in order if each not in chain.joining]
    if relay not in order:
        backwards = tuple(reversed(settled))
        return Upstream((), backwards, frozenset(backwards))
    if relay == order[0]:
        return Upstream((), (OFFERED, *order[1:]), frozenset((OFFERED,)))
    if relay in chain.joining and settled:
        joining = [each for each in order if each in chain.joining]
        plan = pulls_of("binomial", settled, joining, relay, chunks)
        return Upstream(tuple(plan), tuple(settled), _before(plan, settled))
    plan = pulls_of(chain.schedule, settled[:1], settled[1:], relay, chunks)
    place = order.index(relay)
    others = (*reversed(order[:place]), *order[place + 1 :])
    return Upstream(tuple(plan), others, _before(plan, order[:place]))


def _before(plan: Sequence[Pull], known: Collection[int]) -> frozenset[int]:
    return frozenset([*known, *(pull.source for pull in plan)])


def link_of(chain: RelayChain, relay: int) -> RelayLink | None:
    """Where `relay` stands in `chain`; None if it does not."""
    return next((link for link in chain.links if link.relay == relay), None)
