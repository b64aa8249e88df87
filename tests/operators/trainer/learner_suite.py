"""What every learner does (see `operators/trainer/learner_contract.py`): each rank calls the checks in their order.

    python learner_suite.py LEARNER FOLDER RANKS

LEARNER is a `trainer.learner.name`, FOLDER has the folder `model`. Forks the ranks; rank R writes to R.json the checks
that it has passed, by name, and the traceback of the first one that failed, after which it ends.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[3]), str(HERE.parents[2])]

from forked_ranks import fork_ranks  # noqa: E402
from trainer_batches import make_batch, with_floats  # noqa: E402
from two_ranks import restore_from_files  # noqa: E402

from infra.models.checkpoint_folder import load_model  # noqa: E402
from infra.models.weights import weight_tensors, weights_digest  # noqa: E402
from operators.trainer.config import LearnerConfig  # noqa: E402
from operators.trainer.learner import Learner  # noqa: E402
from operators.trainer.learner_contract import LearnerContract  # noqa: E402
from operators.trainer.learners import open_learner  # noqa: E402
from operators.trainer.rank_addresses import AddressFile  # noqa: E402
from operators.trainer.ranks import ALONE, Ranks  # noqa: E402
from operators.trainer.rendezvous import join_process_group  # noqa: E402
from operators.trainer.version_file import ranks_without_file, write_parts  # noqa: E402
from schemas.records import MicroBatch  # noqa: E402

CONFIG = LearnerConfig(learning_rate=1e-2, warmup_steps=0, micro_batch_tokens=64)
TIMEOUT_S = 20.0
"""A rank whose check has failed has ended, which the others notice at once; this is for one that hangs."""


@dataclass(frozen=True)
class Suite:
    """The learner `name`, of the model in the folder of all ranks, on this rank."""

    name: str
    folder: Path
    ranks: Ranks = ALONE

    def start(self) -> LearnerContract:
        """Another learner."""
        return open_learner(replace(CONFIG, name=self.name), self.folder / "model", "cpu", self.ranks)

    def parts(self, number: int = 0) -> list[MicroBatch]:
        """This rank's part of batch `number`: rank 0 has all but the last ones."""
        whole, others = make_batch(seed=number, number=number, parts=4), self.ranks.count - 1
        last = len(whole) - others
        return whole[last + self.ranks.rank - 1 :][:1] if self.ranks.rank else whole[:last]

    @property
    def is_last(self) -> bool:
        """Whether this is the last rank."""
        return self.ranks.rank == self.ranks.count - 1


def digest(learner: LearnerContract) -> str:
    """The digest of the full weights. A collective."""
    return weights_digest(dict(learner.weights().items()))


def begins_with_the_weights_of_the_folder(suite: Suite) -> None:
    assert digest(suite.start()) == weights_digest(weight_tensors(load_model(suite.folder / "model")))


def publishes_what_its_specs_describe(suite: Suite) -> None:
    weights = suite.start().weights(torch.bfloat16)
    specs = weights.specs()
    assert all(spec.is_meta for spec in specs.values())
    found = {name: (each.dtype, each.shape) for name, each in weights.items()}
    assert list(found.items()) == [(name, (spec.dtype, spec.shape)) for name, spec in specs.items()]
    assert {dtype for dtype, _ in found.values()} == {torch.bfloat16}


def writes_the_weights_that_it_gathers(suite: Suite) -> None:
    weights = suite.start().weights(torch.bfloat16)
    views = {name: np.zeros(tensor.nbytes, np.uint8) for name, tensor in weights.specs().items()}
    write = None if suite.ranks.rank else lambda part: part.write(views)
    write_parts(weights, suite.ranks, write, ranks_without_file(suite.ranks, write))
    for name, tensor in weights.items():
        written = torch.from_numpy(views[name]).view(tensor.dtype).view(tensor.shape)
        assert suite.ranks.rank or torch.equal(written, tensor), name


def trains_a_function_of_the_batch(suite: Suite) -> None:
    one, other = suite.start(), suite.start()
    for learner, parts in ((one, suite.parts()), (other, suite.parts()[::-1])):
        before = digest(learner)
        assert learner.update(parts)["grad_norm"] > 0
        assert (learner.updates, learner.skipped_updates) == (1, 0)
        assert digest(learner) != before
    assert digest(one) == digest(other)


def trains_the_batch_of_all_ranks(suite: Suite) -> None:
    found = suite.start().update(suite.parts())
    expected = Learner(CONFIG, suite.folder / "model").update(Suite(suite.name, suite.folder).parts())
    for name in ("loss", "grad_norm", "batch/tokens", "reward/mean"):
        assert math.isclose(found[name], expected[name], rel_tol=1e-4, abs_tol=1e-6), name


def reports_a_change_before_it_happens(suite: Suite) -> None:
    learner, seen = suite.start(), list[str]()
    before = digest(learner)
    learner.before_change = lambda: seen.append(digest(learner))
    learner.update(suite.parts())
    assert seen == [before]


def is_unchanged_by_data_that_cannot_be_trained(suite: Suite) -> None:
    learner, parts = suite.start(), suite.parts()
    before = digest(learner)
    of_one_rank = [with_floats(parts[0], "rewards", {0: math.nan}), *parts[1:]] if suite.is_last else parts
    for wrong in ([], of_one_rank):
        try:
            learner.update(wrong)
        except ValueError:
            continue
        raise AssertionError("the learner trains it")
    assert (digest(learner), learner.updates) == (before, 0)


def continues_bit_identically_from_a_checkpoint(suite: Suite) -> None:
    learner, resumed = suite.start(), suite.start()
    learner.update(suite.parts())
    restore_from_files(resumed, learner.state(), suite.ranks, suite.folder / "checkpoint")
    assert resumed.updates == 1
    metrics = [each.update(suite.parts(1)) for each in (learner, resumed)]
    assert metrics[0]["loss"] == metrics[1]["loss"]
    assert digest(learner) == digest(resumed)


def rejects_the_state_of_another_model(suite: Suite) -> None:
    wrong = Learner(CONFIG, suite.folder / "model").state()
    renamed = dict(wrong.weights)
    renamed["another"] = renamed.pop(next(iter(renamed)))
    learner = suite.start()
    before, said = digest(learner), ""
    try:
        learner.restore(type(wrong)(renamed, {}, wrong.random_state, 5, 0))
    except ValueError as error:
        said = str(error)
    assert "do not match the model" in said
    assert (digest(learner), learner.updates) == (before, 0)


def counts_a_gradient_that_is_not_finite(suite: Suite) -> None:
    learner = suite.start()
    before = digest(learner)
    if suite.is_last:  # a gradient of one rank is skipped by all
        learner.model.get_output_embeddings().register_forward_hook(lambda *args: args[2] * math.inf)
    metrics = learner.update(suite.parts())
    assert metrics["skipped_updates"] == learner.skipped_updates == 1
    assert (digest(learner), learner.updates) == (before, 1)


CHECKS: dict[str, Callable[[Suite], None]] = {
    check.__name__: check
    for check in (
        begins_with_the_weights_of_the_folder,
        publishes_what_its_specs_describe,
        writes_the_weights_that_it_gathers,
        trains_a_function_of_the_batch,
        trains_the_batch_of_all_ranks,
        reports_a_change_before_it_happens,
        is_unchanged_by_data_that_cannot_be_trained,
        continues_bit_identically_from_a_checkpoint,
        rejects_the_state_of_another_model,
        counts_a_gradient_that_is_not_finite,
    )
}


def run_rank(rank: int, name: str, folder: Path, count: int) -> None:
    """Call all checks as rank `rank`."""
    torch.set_num_threads(1)
    own = Ranks(rank, count, timeout_s=TIMEOUT_S)
    ranks = join_process_group(AddressFile(folder / "ranks.json"), own).ranks
    suite, found = Suite(name, folder, ranks), dict[str, str]()
    for check, call in CHECKS.items():
        try:
            call(suite)
            found[check] = ""
        except Exception:  # noqa: BLE001 - it is this check's result
            found[check] = traceback.format_exc()
            break  # the other ranks may be within another collective
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    learner, folder, ranks = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    sys.exit(fork_ranks(run_rank, ranks, learner, folder, ranks))
