"""Which replicas run a version in stages, from the parts that each has. Pure functions.

A pipeline is a sequence of replicas that together have every layer; the first also has the tensors outside of the
layers. Pipelines of few stages come first, so that the replicas form as many as possible (λScale, arXiv 2502.09922,
§4.3: execution pipelines across receivers with complementary blocks); within a pipeline the stages are as even as the
parts allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from infra.store.model_parts import HeldParts

MAX_STAGES = 16


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """`replica` runs layers `first` to `end` (exclusive)."""

    replica: int
    first: int
    end: int


Pipeline = tuple[PlannedStage, ...]


def plan_pipelines(holdings: Mapping[int, HeldParts], layers: int) -> list[Pipeline]:
    """Disjoint pipelines of the replicas with these parts of a model of `layers` layers, shortest first."""
    left = dict(sorted(holdings.items()))
    found: list[Pipeline] = []
    while (pipeline := plan_pipeline(left, layers)) is not None:
        found.append(pipeline)
        for stage in pipeline:
            del left[stage.replica]
    return found


def plan_pipeline(holdings: Mapping[int, HeldParts], layers: int, leader: int | None = None) -> Pipeline | None:
    """The pipeline with the fewest stages and, of those, the most even one; None if the replicas do not cover it.

    With `leader` that replica leads, because it has the requests.
    """
    leaders = [replica for replica, held in holdings.items() if held.ends and leader in (None, replica)]
    chains = [chain for replica in leaders if (chain := _chain(replica, holdings, layers)) is not None]
    plans = [_even(chain, holdings, layers) for chain in chains if len(chain) <= MAX_STAGES]
    return min(plans, key=lambda stages: (len(stages), _longest(stages)), default=None)


def _chain(leader: int, holdings: Mapping[int, HeldParts], layers: int) -> list[int] | None:
    """Replicas that cover all layers, beginning with `leader`: each continues where the one before ends, and the one
    that reaches furthest is next."""
    chain, reached = [leader], _reach(holdings[leader], 0)
    while reached < layers:
        others = [(each, _reach(held, reached)) for each, held in holdings.items() if each not in chain]
        best, end = max(others, key=lambda other: other[1], default=(-1, reached))
        if end <= reached:
            return None
        chain.append(best)
        reached = end
    return chain


def _reach(held: HeldParts, first: int) -> int:
    """The first layer from `first` on that `held` lacks."""
    end = first
    while end in held.layers:
        end += 1
    return end


def _even(chain: Sequence[int], holdings: Mapping[int, HeldParts], layers: int) -> Pipeline:
    """Stages of the replicas of `chain`, in order, whose longest is as short as possible. A leader may have none."""
    costs: list[dict[int, tuple[int, tuple[int, ...]]]] = [{0: (0, (0,))}]
    for replica in chain:
        reachable: dict[int, tuple[int, tuple[int, ...]]] = {}
        for first, (longest, cuts) in costs[-1].items():
            for end in range(first, min(layers, _reach(holdings[replica], first)) + 1):
                cost = max(longest, end - first), (*cuts, end)
                if end not in reachable or cost < reachable[end]:
                    reachable[end] = cost
        costs.append(reachable)
    cuts = costs[-1][layers][1]
    stages = [PlannedStage(replica, *cut) for replica, cut in zip(chain, pairwise(cuts), strict=True)]
    return tuple(stage for place, stage in enumerate(stages) if place == 0 or stage.end > stage.first)


def _longest(stages: Pipeline) -> int:
    return max(stage.end - stage.first for stage in stages)
