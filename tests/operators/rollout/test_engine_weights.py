"""The contract of every engine for weights: one version at a time, loaded in place, and behaviour logprobs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_kinds import KINDS, OWN_SAMPLERS, WITH_MODEL, MakeEngine, assert_equal, maker, stopping
from memory_limits import no_more_memory_than
from safetensors.torch import save_file
from tiny_engines import mixed, plain_logprobs, request, run
from tiny_models import tiny_model
from vllm_engines import FAMILY, MIXTURE

from infra.models.weights import save_weights, weight_tensors
from infra.store.weight_store import WeightStore
from operators.rollout.engine import Completion
from schemas.records import PolicyVersion


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> MakeEngine:
    return maker(request.param)


@pytest.fixture(params=[kind for kind in KINDS if kind != "two_versions"])
def make_of_one_version(request: pytest.FixtureRequest) -> MakeEngine:
    return maker(request.param)


@pytest.fixture(params=WITH_MODEL)
def make_with_model(request: pytest.FixtureRequest) -> MakeEngine:
    return maker(request.param)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_weights(tiny_model(FAMILY, seed=1), tmp_path / "w")
    return tmp_path / "w"


def test_load_sets_the_version(make: MakeEngine, weights: Path) -> None:
    it = make()
    assert it.version is None
    it.load(weights, PolicyVersion(1, 7))
    assert it.version == PolicyVersion(1, 7)
    assert len(run(it, stopping(6))) == 6
    it.load(weights, PolicyVersion(1, 8))
    assert it.version == PolicyVersion(1, 8)


def test_load_raises_while_requests_run(make_of_one_version: MakeEngine, weights: Path) -> None:
    make = make_of_one_version
    it = make(slots=1)
    it.submit(request(0))
    with pytest.raises(RuntimeError, match="0 requests run and 1 wait"):
        it.load(weights, PolicyVersion(1, 7))
    it.step()
    with pytest.raises(RuntimeError, match="1 requests run and 0 wait"):
        it.load(weights, PolicyVersion(1, 7))
    assert it.version is None
    assert_equal(run(it, [])["p0.0"], run(make(), [request(0)])["p0.0"])


def test_load_replaces_weights_without_a_second_copy(make_with_model: MakeEngine, tmp_path: Path) -> None:
    save_weights(tiny_model("wide"), tmp_path / "w")
    it, version = make_with_model("wide", slots=2), PolicyVersion(1, 1)
    with WeightStore(tmp_path / "store") as store:
        with store.begin(version, (tmp_path / "w").stat().st_size) as arriving, (tmp_path / "w").open("rb") as file:
            assert file.readinto(arriving.view) == arriving.size
            arriving.seal()
        with store.pin(version) as weights, no_more_memory_than(75_000_000):
            for _ in range(3):  # and repeated loads leave nothing over
                it.load(weights, version)
    assert it.version == version


@pytest.mark.parametrize("broken", ["nothing", "no weights", "another model", "another shape"])
def test_load_of_invalid_weights_changes_nothing(
    make_with_model: MakeEngine, weights: Path, broken: str, tmp_path: Path
) -> None:
    file = tmp_path / "broken"
    if broken == "no weights":
        file.write_bytes(b"?" * 100)
    elif broken == "another model":
        save_weights(tiny_model("qwen2"), file)
    elif broken == "another shape":
        tensors = {name: tensor.clone() for name, tensor in weight_tensors(tiny_model(FAMILY, seed=1)).items()}
        save_file(tensors | {"model.norm.weight": torch.zeros(5)}, file)
    it = make_with_model()
    it.load(weights, PolicyVersion(1, 7))
    (before,) = run(it, [request(0)]).values()
    says = {
        "nothing": "no weight file",
        "no weights": "is not a safetensors file",
        "another model": "do not fit",
    }
    with pytest.raises(
        (FileNotFoundError, ValueError), match=says.get(broken, r"model.norm.weight has shape \[5\], the model \[32\]")
    ):
        it.load(file, PolicyVersion(1, 8))
    assert it.version == PolicyVersion(1, 7)
    assert_equal(run(it, [request(0)])["p0.0"], before)


def test_load_rounds_weights_to_the_engines_precision(make_with_model: MakeEngine, weights: Path) -> None:
    it, asked = make_with_model(dtype="bfloat16"), [request(i) for i in range(9)]
    it.load(weights, PolicyVersion(1, 1))
    new, old = (tiny_model(FAMILY, seed).to(torch.bfloat16).float() for seed in (1, 0))
    off: dict[str, list[np.ndarray]] = {"new": [], "old": []}
    for name, done in run(it, asked).items():
        one = next(one for one in asked if one.trajectory_id == name)
        for which, reference in (("new", new), ("old", old)):
            off[which].append(plain_logprobs(reference, one, done.generated) - done.generated.logprobs)
    assert np.abs(np.concatenate(off["new"])).mean() < 0.05 < 0.3 < np.abs(np.concatenate(off["old"])).mean()


def test_engines_of_one_process_are_independent(make: MakeEngine, weights: Path) -> None:
    asked = stopping(8)
    old, new = make(slots=8), make(slots=5)
    new.load(weights, PolicyVersion(1, 1))
    alone = [run(old, asked), run(new, asked)]
    for it in (old, new):
        for one in asked:
            it.submit(one)
    together: list[dict[str, Completion]] = [{}, {}]
    while old.due() < math.inf or new.due() < math.inf:
        for it, done in zip((old, new), together, strict=True):
            done |= {completion.trajectory_id: completion for completion in it.step()}
    for done, expected in zip(together, alone, strict=True):
        assert done.keys() == expected.keys()
        for name, completion in done.items():
            assert_equal(completion, expected[name])


@pytest.mark.parametrize("family", [FAMILY, "qwen3_tied", MIXTURE])
def test_behaviour_logprobs_match_the_sampling_distribution(
    make_with_model: MakeEngine, family: str, tmp_path: Path
) -> None:
    it, asked = make_with_model(family, slots=5), mixed(15)
    for seed in (0, 1):
        reference = tiny_model(family, seed)
        if seed:
            save_weights(reference, tmp_path / "w")
            it.load(tmp_path / "w", PolicyVersion(1, 1))
        for name, done in run(it, asked).items():
            one = next(one for one in asked if one.trajectory_id == name)
            assert np.abs(plain_logprobs(reference, one, done.generated) - done.generated.logprobs).max() < 1e-4


@pytest.mark.parametrize("kind", WITH_MODEL)
def test_non_finite_logits_fail_only_their_request(kind: str, tmp_path: Path) -> None:
    make_with_model = maker(kind)
    broken = tiny_model(FAMILY)
    one, others = request(5, prompt=20), [request(1), request(9, prompt=20)]
    lost = next(token for token in one.prompt.tolist() if all(token not in other.prompt for other in others))
    with torch.no_grad():
        weight_tensors(broken)["model.embed_tokens.weight"][lost] = torch.nan
    save_weights(broken, tmp_path / "broken")
    it, fresh = make_with_model(slots=3), make_with_model(slots=5)
    for each in (it, fresh):
        each.load(tmp_path / "broken", PolicyVersion(1, 1))
    expected = run(fresh, others)
    together = run(it, [others[0], one, others[1]])
    failed = together.pop(one.trajectory_id)
    assert (failed.finish_reason, len(failed.generated.token_ids)) == ("failed", 0)
    assert "not finite" in str(failed.error)
    for done in (together, run(it, others)):
        assert done.keys() == expected.keys()
        if kind in OWN_SAMPLERS:  # the others were resumed
            for other in others:
                found = done[other.trajectory_id].generated
                assert np.abs(plain_logprobs(tiny_model(FAMILY), other, found) - found.logprobs).max() < 1e-4
            continue
        for name, completion in done.items():
            assert_equal(completion, expected[name])
