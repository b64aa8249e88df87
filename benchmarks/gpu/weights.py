"""The way of weights: from the learner to the machine's store, and from the store to the engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import torch

from benchmarks.engine_weights import VERSIONS, load_version, two_versions
from benchmarks.gpu.batches import batch_of
from benchmarks.gpu.engine import open_engine, root_of_two
from benchmarks.gpu.figures import Figure, seconds, synchronize
from benchmarks.gpu.learner import learner_config
from benchmarks.gpu.settings import Settings
from benchmarks.stores import publish, temporary_store
from infra.models.dtypes import tensor_specs
from infra.models.weights import mapped_tensors, weight_tensors
from infra.store.publisher import Publisher
from operators.trainer.joint_actions import JointActions
from operators.trainer.learner import Learner
from operators.trainer.rendezvous import Rendezvous
from schemas.records import PolicyVersion, WeightVersion


def publication(settings: Settings, model: Path) -> list[Figure]:
    """How long a publication stalls the trainer, with an update after it and without, and when its version is complete.

    Weights are written while the update computes its gradients; its optimizer step waits for that.
    """
    learner = Learner(learner_config(settings, "bfloat16"), model, settings.device)
    weights = learner.weights(torch.bfloat16)
    joint = JointActions(Rendezvous(), torch.device(settings.device), weights, learner.weights())
    learner.before_change = joint.wait_until_written
    part = batch_of(settings.sequences, settings.length, int(settings.shape.config["vocab_size"]))
    stalls, written, announced, completions, beside = [], [], [], [], []
    began = 0.0
    before: dict[str, torch.Tensor] = {}
    with temporary_store(root_of_two(model)) as store:

        def announce(_: WeightVersion) -> None:
            announced.append(time.perf_counter() - began)

        with closing(Publisher(store, announce, tensor_specs(weights.specs()))) as publisher:
            for number in range(1, settings.repetitions + 3):
                synchronize(settings.device)
                began = time.perf_counter()
                publish(publisher, joint, PolicyVersion(1, 2 * number))
                joint.wait_until_written()
                written.append(time.perf_counter() - began)
                publisher.flush()
                completions.append(time.perf_counter() - began)
                before = {name: tensor.clone() for name, tensor in weights.items()}
                joint.take_waited()
                began = time.perf_counter()
                publish(publisher, joint, PolicyVersion(1, 2 * number + 1))
                called = time.perf_counter() - began
                learner.update([part])
                beside.append(time.perf_counter() - began)
                stalls.append(called + joint.take_waited())
                publisher.flush()
        newest = store.newest()
        assert newest is not None
        size = store.path(newest).stat().st_size
        differing = _differing(store.path(newest), before)
    joint.close()
    alone = seconds(settings.device, lambda: learner.update([part]), settings.repetitions, 0)
    stall, copy = statistics.median(stalls[2:]), _copy_to_pinned(settings, size)
    update = statistics.median(beside[2:])
    return [
        Figure("bytes of a version", size / 1e9, "GB", note=f"store in {root_of_two(model).parent}"),
        Figure("stall of a publication", 1e3 * stall, "ms", note="of an update after it, which computes meanwhile"),
        Figure("written after", 1e3 * statistics.median(written[2:]), "ms", note="the stall without an update"),
        Figure("announced after", 1e3 * statistics.median(announced[4::2]), "ms", note="written, hashed and sealed"),
        Figure("ready for the next one after", 1e3 * statistics.median(completions[2:]), "ms", note="its memory, too"),
        Figure("one copy to pinned memory", 1e3 * copy, "ms", note=f"{size / copy / 1e9:.1f} GB/s"),
        Figure("stall over that copy", stall / copy, "", ("<=", 1.0)),
        Figure("update after a publication over one alone", update / alone, "", ("<=", 1.1)),
        Figure("tensors that are not the learner's", differing, "", ("<=", 0)),
    ]


def load(settings: Settings, model: Path) -> list[Figure]:
    """How long an engine needs to load a version from the store, beside one copy of its bytes to the device."""
    engine = open_engine(settings, model)
    with two_versions(model, root_of_two(model)) as store:
        size = store.path(VERSIONS[0]).stat().st_size
        numbers = iter(range(1 << 20))
        took = seconds(
            settings.device,
            lambda: load_version(engine, store, VERSIONS[next(numbers) % 2]),
            settings.repetitions,
        )
        newest = VERSIONS[settings.repetitions % 2]
        assert engine.version == newest
        differing = _differing(store.path(newest), weight_tensors(engine.model))
    source = torch.zeros(size, dtype=torch.uint8, pin_memory=settings.device != "cpu")
    target = torch.zeros(size, dtype=torch.uint8, device=settings.device)
    copy = seconds(settings.device, lambda: target.copy_(source), settings.repetitions)
    return [
        Figure("load of a version", 1e3 * took, "ms", note=f"{size / took / 1e9:.1f} GB/s"),
        Figure("one copy from pinned memory", 1e3 * copy, "ms", note=f"{size / copy / 1e9:.1f} GB/s"),
        Figure("load over that copy", took / copy, "", ("<=", 5.0)),
        Figure("tensors that are not the version's", differing, "", ("<=", 0)),
    ]


def _differing(version: Path, tensors: Mapping[str, torch.Tensor]) -> int:
    """How many tensors of the file `version` differ from `tensors`, to whose dtypes they are rounded."""
    stored = mapped_tensors(version)
    return sum(not torch.equal(tensor.to(tensors[name].dtype), tensors[name].cpu()) for name, tensor in stored)


def _copy_to_pinned(settings: Settings, size: int) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=settings.device)
    target = torch.zeros(size, dtype=torch.uint8, pin_memory=settings.device != "cpu")
    return seconds(settings.device, lambda: target.copy_(source), settings.repetitions)
