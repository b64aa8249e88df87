"""What every learner does (see `operators/trainer/learner_contract.py`). Add a learner to `LEARNERS` to test it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from stored_states import read_checkpoint
from trainer_batches import make_batch, save_tiny_model, with_floats

from infra.models.checkpoint_folder import load_model
from infra.models.weights import weight_tensors, weights_digest
from operators.trainer.checkpoint import write_checkpoint
from operators.trainer.checkpoint_files import TrainerPosition
from operators.trainer.config import LearnerConfig
from operators.trainer.learner import Learner
from operators.trainer.learner_contract import LearnerContract, OpenLearner
from operators.trainer.ranks import ALONE
from operators.trainer.version_file import write_parts
from schemas.records import PolicyVersion

LEARNERS: dict[str, OpenLearner] = {"fsdp2": Learner}
CONFIG = LearnerConfig(learning_rate=1e-2, warmup_steps=0, micro_batch_tokens=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("contract") / "model")


@pytest.fixture(params=LEARNERS)
def start(request: pytest.FixtureRequest, folder: Path) -> Callable[[], LearnerContract]:
    """A function that opens a learner of the tiny model."""
    return lambda: LEARNERS[request.param](CONFIG, folder, "cpu", ALONE)


def digest(learner: LearnerContract) -> str:
    return weights_digest(dict(learner.weights().items()))


def test_learner_begins_with_the_weights_of_the_folder(start: Callable[[], LearnerContract], folder: Path) -> None:
    assert digest(start()) == weights_digest(weight_tensors(load_model(folder)))


def test_learner_publishes_what_its_specs_describe(start: Callable[[], LearnerContract]) -> None:
    weights = start().weights(torch.bfloat16)
    specs = weights.specs()
    assert all(spec.is_meta for spec in specs.values())
    found = {name: (each.dtype, each.shape) for name, each in weights.items()}
    assert list(found.items()) == [(name, (spec.dtype, spec.shape)) for name, spec in specs.items()]
    assert {dtype for dtype, _ in found.values()} == {torch.bfloat16}


def test_learner_writes_the_weights_that_it_gathers(start: Callable[[], LearnerContract]) -> None:
    weights = start().weights(torch.bfloat16)
    views = {name: np.zeros(tensor.nbytes, np.uint8) for name, tensor in weights.specs().items()}
    write_parts(weights, ALONE, lambda part: part.write(views))
    for name, tensor in weights.items():
        assert torch.equal(torch.from_numpy(views[name]).view(tensor.dtype).view(tensor.shape), tensor), name


def test_learner_update_is_a_function_of_the_batch(start: Callable[[], LearnerContract]) -> None:
    one, other = start(), start()
    batch = make_batch(parts=3)
    for learner, parts in ((one, batch), (other, batch[::-1])):
        before = digest(learner)
        assert learner.update(parts)["grad_norm"] > 0
        assert (learner.updates, learner.skipped_updates) == (1, 0)
        assert digest(learner) != before
    assert digest(one) == digest(other)


def test_learner_reports_a_change_before_it_happens(start: Callable[[], LearnerContract]) -> None:
    learner, seen = start(), []
    before = digest(learner)
    learner.before_change = lambda: seen.append(digest(learner))
    learner.update(make_batch())
    assert seen == [before]


def test_learner_is_unchanged_by_data_that_cannot_be_trained(start: Callable[[], LearnerContract]) -> None:
    learner = start()
    before = digest(learner)
    (part,) = make_batch()
    for wrong in ([], [with_floats(part, "rewards", {0: math.nan})]):
        with pytest.raises(ValueError, match=r"."):
            learner.update(wrong)
    assert (digest(learner), learner.updates) == (before, 0)


def test_learner_continues_bit_identically_from_a_checkpoint(
    start: Callable[[], LearnerContract], tmp_path: Path
) -> None:
    learner, resumed = start(), start()
    learner.update(make_batch())
    place = write_checkpoint(tmp_path, learner.state(), TrainerPosition(PolicyVersion(1, 1), (3,), 16))
    resumed.restore(read_checkpoint(place)[0])
    assert resumed.updates == 1
    metrics = [each.update(make_batch(seed=1, number=1)) for each in (learner, resumed)]
    assert metrics[0]["loss"] == metrics[1]["loss"]
    assert digest(learner) == digest(resumed)


def test_learner_rejects_the_state_of_another_model(start: Callable[[], LearnerContract], tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other")
    wrong = Learner(LearnerConfig(algorithm=CONFIG.algorithm), other).state()
    renamed = dict(wrong.weights)
    renamed["another"] = renamed.pop(next(iter(renamed)))
    learner = start()
    before = digest(learner)
    with pytest.raises(ValueError, match="do not match the model"):
        learner.restore(type(wrong)(renamed, {}, wrong.random_state, 5, 0))
    assert (digest(learner), learner.updates) == (before, 0)


def test_learner_counts_a_gradient_that_is_not_finite(start: Callable[[], LearnerContract]) -> None:
    learner = start()
    before = digest(learner)
    handle = learner.model.get_output_embeddings().register_forward_hook(lambda *args: args[2] * math.inf)
    metrics = learner.update(make_batch())
    handle.remove()
    assert metrics["skipped_updates"] == learner.skipped_updates == 1
    assert (digest(learner), learner.updates) == (before, 1)
