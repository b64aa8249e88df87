"""Derives from the relay chain what one relay pulls from which source, and its fallback sources. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from infra.store.model_parts import ModelParts, chunk_orders
from infra.transport.schedules import Pull, pulls_of
from schemas.records import RelayChain, RelayLink

TRAINER = -1
"""Source number of a trainer that pushes its version to the master."""


@dataclass(frozen=True)
class Upstream:
    """The planned pulls of a relay, its fallback sources in order, and the sources whose chunks it may wait for."""

    plan: tuple[Pull, ...]
    fallbacks: tuple[int, ...]
    may_wait: frozenset[int]


def upstream_of(chain: RelayChain, relay: int, chunks: int, parts: ModelParts | None = None) -> Upstream:
    """The sources from which `relay` gets `chunks` chunks; joining relays get different shares of `parts` first.

    The master waits only for a trainer that pushes. Other relays pull along the schedule from relays before them in the
    chain and wait only for those, so no two relays wait for each other. A joining relay pulls from all complete relays
    in parallel. A relay that is not in the chain requests from the last relay first.
    """
    order = [link.relay for link in chain.links]
    complete = [each for each in order if each not in chain.joining]
    if relay not in order:
        backwards = tuple(reversed(complete))
        return Upstream((), backwards, frozenset(backwards))
    if relay == order[0]:
        return Upstream((), (TRAINER, *order[1:]), frozenset((TRAINER,)))
    if relay in chain.joining and complete:
        joining = [each for each in order if each in chain.joining]
        orders = None if parts is None else chunk_orders(parts, chunks, min(len(complete), len(joining)))
        plan = pulls_of("binomial", complete, joining, relay, chunks, orders)
        return Upstream(tuple(plan), tuple(complete), _upstream_sources(plan, complete))
    plan = pulls_of(chain.schedule, complete[:1], complete[1:], relay, chunks)
    place = order.index(relay)
    fallbacks = (*reversed(order[:place]), *order[place + 1 :])
    return Upstream(tuple(plan), fallbacks, _upstream_sources(plan, order[:place]))


def _upstream_sources(plan: Sequence[Pull], known: Collection[int]) -> frozenset[int]:
    return frozenset([*known, *(pull.source for pull in plan)])


def find_link(chain: RelayChain, relay: int) -> RelayLink | None:
    """The link of `relay` in `chain`; None if it is not in the chain."""
    return next((link for link in chain.links if link.relay == relay), None)
