"""The state of a trainer with a model after a run of any length: a tiny model and the checkpoint of the newest version.

`prepare` writes both to a folder and returns the version's manifest. A trainer that starts there reads the checkpoint,
and restores the version to the store of its machine, which is empty after a restart.
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

from benchmarks.tensor_copies import copy_tensor
from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig
from infra.models.dtypes import tensor_specs
from infra.store.ownership import remove_store
from infra.store.publisher import Publisher
from infra.store.weight_store import WeightStore
from operators.trainer.checkpoint import write_checkpoint
from operators.trainer.checkpoint_files import TrainerPosition
from operators.trainer.config import LearnerConfig
from operators.trainer.learner import Learner
from operators.trainer.train_batches import TrainBatches  # noqa: F401 - loaded before the trainer is forked
from schemas.records import PolicyVersion, WeightVersion


def prepare(folder: Path, run: str, version: PolicyVersion, offset: int) -> WeightVersion:
    """Write a model and the checkpoint of `version`, whose next batch is at `offset`; return its manifest."""
    model, tokenizer = build_demo_model(DemoModelConfig())
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    learner = Learner(LearnerConfig(), folder / "model")
    position = TrainerPosition(version, (offset,), 128 * version.number)
    write_checkpoint(folder / run / "checkpoints", learner.state(), position)
    weights, published = learner.weights(), list[WeightVersion]()
    specs = tensor_specs(weights.specs())
    with tempfile.TemporaryDirectory() as root, WeightStore(Path(root) / "store") as store:
        with closing(Publisher(store, published.append, specs, None, copy_tensor)) as publisher:
            publisher.publish(
                dict(weights.items()),
                version,
                step=version.number,
                batches=[version.number - 1],
                batch_offsets=[offset],
                trajectories_trained=position.trajectories_trained,
            )
            publisher.flush()
        store.close()
        remove_store(store.root, in_use=True)
    return published[0]
