"""A moved trajectory has the tokens of an unmoved one: its draws depend only on the trajectory and the position.

Another batch shape changes logits by about 1e-6, so a draw that close to a boundary may give another token. The tests
accept only such differences.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from record_factories import prompt, version
from scripted_engine import ScriptedWeights
from tiny_engines import engine
from tiny_models import VOCABULARY, tiny_model

from infra.transport.endpoint import Endpoint
from infra.transport.kv_transfer import KVTransfers
from operators.io.repartition import Placed
from operators.rollout.random_streams import stream_key, uniforms
from operators.rollout.replica import Replica
from schemas.columns import token_ids
from schemas.records import Assignment, Progress, Prompt, Release, Sampling, Trajectory

SLOTS = 64

Generated = tuple[dict[str, Trajectory], set[str]]


def asked(number: int) -> Prompt:
    rng = np.random.default_rng(number)
    sampling = Sampling(
        temperature=float(rng.choice([1.0, 0.7])),
        top_p=float(rng.choice([1.0, 1.0, 0.9])),
        top_k=int(rng.choice([0, 0, 8])),
        max_new_tokens=int(rng.integers(4, 40)),
        stop_token_ids=(3,),
        seed=5,
    )
    length = int(rng.integers(1, 20))
    return prompt(number, 1, token_ids=token_ids(rng.integers(0, VOCABULARY, length)), sampling=sampling)


def replica(index: int, kv_transfers: KVTransfers | None = None) -> Replica:
    weights = ScriptedWeights()
    weights.add(version(0))
    its = engine(slots=SLOTS, version=version(0))
    made = Replica(index, 1, its, weights, str, lambda: 0, kv_transfers=kv_transfers)
    made.announce(version(0))
    return made


def generate(count: int, moves: bool, transfers: tuple[KVTransfers | None, ...] = (None, None)) -> Generated:
    """All trajectories, and the ids of those moved after their first token, with KV if `transfers` are given."""
    rng, replicas, lease = random.Random(0), [replica(index, transfers[index]) for index in range(2)], 1
    done: dict[str, Trajectory] = {}
    moved: set[str] = set()
    owners: dict[str, int] = {}
    given = 0
    while len(done) < count:
        for number in range(given, min(count, len(done) + SLOTS)):  # so few that all of them run
            owners[f"p{number}.0"] = number % 2
            replicas[number % 2].accept(Assignment(asked(number), 0, 1, 1, number % 2, 1, None, None, 0))
            given = number + 1
        for each in replicas:
            for event in each.step():
                if isinstance(event, Trajectory):
                    done[event.trajectory_id] = event
                    del owners[event.trajectory_id]
        for source in (0, 1) if moves and rng.random() < 0.5 else ():
            here = [name for name, owner in owners.items() if owner == source]
            leaving = rng.sample(here, rng.randint(0, len(here)))
            lease += 1
            order = Release("1-1.1", tuple(leaving), (lease,) * len(leaving), 1 - source, 1, source, 1)
            for event in replicas[source].hand_over(order):
                if isinstance(event, Placed):
                    placed = event.assignment
                    replicas[1 - source].accept(placed)
                    owners[placed.trajectory_id] = 1 - source
                    moved |= {placed.trajectory_id} if placed.partial is not None else set()
                else:
                    assert isinstance(event, Progress)
    return done, moved


def distance_to_boundary(of: Trajectory, position: int) -> float:
    """The distance of the draw at `position` from the boundary to another token, or of top-p from keeping another set
    of tokens, whichever is smaller."""
    sampling = of.prompt.sampling
    known = of.prompt.token_ids.to_pylist() + of.response.token_ids.to_pylist()[:position]
    with torch.inference_mode():
        logits = tiny_model()(input_ids=torch.tensor([known])).logits[0, -1].double() / sampling.temperature
    ranked = logits.sort(descending=True)
    kept = ranked.values[: sampling.top_k or VOCABULARY].softmax(-1)
    before = (kept.cumsum(-1) - kept).numpy()
    nucleus = ranked.indices[: len(kept)][before < sampling.top_p]
    edge = float(np.abs(before - sampling.top_p).min()) if sampling.top_p < 1 else 1.0
    cut = torch.full_like(logits, -torch.inf).index_copy(0, nucleus, logits[nucleus])
    cumulative = cut.softmax(-1).cumsum(-1).numpy()
    key = np.array([stream_key(sampling.seed, of.trajectory_id)], np.uint64)
    return min(edge, float(np.abs(cumulative - uniforms(key, np.array([position]))[0]).min()))


@pytest.fixture
def transfers() -> Iterator[tuple[KVTransfers, KVTransfers]]:
    endpoint = Endpoint(token="a-token-of-the-tests")
    both = KVTransfers("run", endpoint, 10**9), KVTransfers("run", endpoint, 10**9)
    yield both
    for each in both:
        each.close()


@pytest.mark.parametrize(("count", "with_kv"), [(1300, False), (400, True)])
def test_moved_trajectories_keep_their_tokens(
    count: int, with_kv: bool, transfers: tuple[KVTransfers, KVTransfers]
) -> None:
    unmoved, nothing = generate(count, moves=False)
    done, moved = generate(count, moves=True, transfers=transfers if with_kv else (None, None))
    assert not nothing
    assert len(moved) >= 0.75 * count
    flipped = 0
    for name in moved:
        one, other = unmoved[name].response, done[name].response
        tokens, others = one.token_ids.to_pylist(), other.token_ids.to_pylist()
        same = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), None)
        if same is None:
            assert tokens == others
            same = len(tokens)
        else:
            flipped += 1
            assert distance_to_boundary(unmoved[name], same) <= 1e-5
        difference = np.abs(one.logprobs.to_numpy()[:same] - other.logprobs.to_numpy()[:same])
        assert difference.max(initial=0.0) <= 1e-4
    assert flipped <= len(moved) / 1000


def test_boundary_check_detects_independent_draws() -> None:
    """The distance to the nearest boundary is rarely small, so the accepted differences are rare."""
    done, _ = generate(20, moves=False)
    distances = [distance_to_boundary(each, 0) for each in done.values()]
    assert sorted(distances)[2] > 1e-5
