"""The memory that a rank needs to train a model, computed from the model's shape before anything is loaded.

All figures are bytes of one rank; `docs/training.md` has them for the target set-ups.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from infra.sizes import size_text
from infra.store.weight_files import folder_tensors
from operators.trainer.algorithms import FUNCTIONS
from operators.trainer.config import LearnerConfig
from operators.trainer.training_config import TrainingConfig

REMOTE_BYTES_PER_S = (740_000_000, 600_000_000)
"""What rank 0 receives over gloo from one and from three ranks as on other machines: `benchmarks.publication --remote`,
between processes of one machine."""
_LAYER = re.compile(r"\.(\d+)\.")
_MASTER, _GRADIENT, _MOMENTS = 4, 4, 8
_LAYER_ACTIVATIONS = 16
"""Values that a layer keeps for its backward pass, per token, in units of its width; the MLP's come in addition."""
_MLP_ACTIVATIONS = 4
"""Values per token that an MLP keeps, in units of its width."""
_LOGIT_COPIES = 3
"""Float32 tensors of the size of the logits that exist at once: logits, log-softmax, gradient. With bfloat16 the
model's own logits and their gradient are in addition; measured on an H200, the plan is 2 % above the peak."""
PINNED = 2
"""The most by which a block of pinned memory exceeds the tensor in it: torch rounds its size up to a power of two."""
_MODELS = (("weights", "moments"), ("critic", "critic's moments"), ("reference",))
"""The parts of each model that `share_device` moves. Gradients exist only while their model takes its steps."""
_OFFLOADED = {"moments": ("moments", "critic's moments"), "reference": ("reference",)}
"""The parts that each value of `offload` moves."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Numbers of parameters (all; of the largest layer; of the largest tensor outside of layers: the embedding),
    and the sizes of activations.
    """

    parameters: int
    largest_layer: int
    embedding: int
    layers: int
    width: int
    mlp_width: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one rank, by purpose."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def plan_memory(shape: ModelShape, ranks: int, config: LearnerConfig) -> MemoryPlan:
    """The memory of a rank of `ranks` that trains a model of `shape`."""
    used = 2 if config.precision == "bfloat16" else 4
    share = -(-shape.parameters // ranks)
    tokens = config.micro_batch_tokens
    of_layer = tokens * (_LAYER_ACTIVATIONS * shape.width + _MLP_ACTIVATIONS * shape.mlp_width) * used
    kept = tokens * shape.width * used if config.gradient_checkpointing else of_layer
    gathered = 0
    if ranks > 1:
        # A layer, its gradient and its float32 sum; the next layer, with its buffer; the output layer stays gathered.
        of_one = 2 * used + _GRADIENT
        two_layers = shape.embedding * used + shape.largest_layer * (of_one + 2 * used)
        gathered = max(shape.embedding * of_one, two_layers)
        if config.keep_gathered:
            gathered = max(gathered, shape.parameters * used + shape.largest_layer * _GRADIENT)
    elif config.precision == "bfloat16":
        gathered = shape.parameters * used  # autocast's rounded copy
    trained = -(-(_adapters(shape, config.lora.rank) if config.lora.rank else shape.parameters) // ranks)
    of_reference = _MASTER if config.reference_dtype == "float32" else 2
    activations = shape.layers * kept + of_layer
    of_logit = 4 * _LOGIT_COPIES + (2 * used if config.precision == "bfloat16" else 0)
    logits = min(tokens, config.logits_chunk_tokens) * shape.vocabulary * of_logit
    has_critic = FUNCTIONS[config.algorithm.name].critic
    moments = [trained * _MOMENTS, share * _MOMENTS if has_critic else 0]
    if "moments" in config.offload:
        # One model's at a time take the place of what exists only while they are on the host.
        moments = [max(0, max(moments) - gathered - activations - logits), 0]
    for_reference = shape.layers * kept if "reference" in config.offload else 0
    parts = {
        "weights": share * _MASTER + (trained * _MASTER if config.lora.rank else 0),
        "gradients": (max(trained, share) if has_critic else trained) * _GRADIENT,  # one model's at a time
        "moments": moments[0],
        "critic": share * _MASTER if has_critic else 0,
        "critic's moments": moments[1],
        "reference": max(0, share * of_reference - for_reference) if config.algorithm.kl_coefficient else 0,
        "gathered layers": gathered,
        "activations": activations,
        "logits": logits,
    }
    if config.share_device:
        largest = max(_MODELS, key=lambda names: sum(parts[name] for name in names))
        parts |= {name: 0 for names in _MODELS if names is not largest for name in names}
    return MemoryPlan(parts)


def plan_rank(shape: ModelShape, config: TrainingConfig, longest: int = 0) -> MemoryPlan:
    """The memory of a rank of `config` on its device. On a CPU, which is the host, nothing is offloaded.

    A sequence of `longest` tokens is a micro-batch of its own, of which a rank has a slice.
    """
    tokens = max(config.learner.micro_batch_tokens, slice_tokens(config, longest))
    learner = replace(config.learner, micro_batch_tokens=tokens)
    on_gpu = config.device.startswith("cuda")
    return plan_memory(shape, config.ranks_of_a_copy, learner if on_gpu else _on_device(learner))


def slice_tokens(config: TrainingConfig, longest: int) -> int:
    """The tokens of a sequence of `longest` that each rank of a context group has."""
    return -(-longest // config.context_ranks)


def offloaded_bytes(shape: ModelShape, config: TrainingConfig) -> int:
    """Bytes of the tensors that a rank of `config` on a GPU offloads; they take at most `PINNED` times as many."""
    parts = plan_memory(shape, config.ranks_of_a_copy, _on_device(config.learner)).parts
    in_turn = _models_in_turn(parts) if config.learner.share_device else ()
    models = in_turn or [_OFFLOADED[each] for each in config.learner.offload]
    return sum(parts[name] for names in models for name in names)


def _models_in_turn(parts: Mapping[str, int]) -> Sequence[Sequence[str]]:
    """The names in `parts` of each model that takes turns on a shared device; none if the policy is alone."""
    present = [names for names in _MODELS if any(parts[name] for name in names)]
    return present if len(present) > 1 else ()


def _on_device(config: LearnerConfig) -> LearnerConfig:
    """`config` with everything on the device at once."""
    return replace(config, offload=(), share_device=False)


def _adapters(shape: ModelShape, rank: int) -> int:
    """At most so many parameters have adapters of all linear layers: four in attention, three in the MLP."""
    return shape.layers * rank * (8 * shape.width + 3 * (shape.width + shape.mlp_width))


def check_memory(plan: MemoryPlan, available: int, where: str, config: TrainingConfig, longest: int = 0) -> None:
    """Raise ValueError if `plan`, that of `config`, needs more than the `available` bytes of `where`, with the settings
    that help.
    """
    if plan.total <= available:
        return
    largest = sorted(plan.parts.items(), key=lambda part: -part[1])[:4]
    described = ", ".join(f"{name} {size_text(size)}" for name, size in largest)
    raise ValueError(
        f"a rank needs {size_text(plan.total)} ({described}), but {where} has {size_text(available)} free: "
        f"{', or '.join(_advice(plan, config, longest))} (see `laminar train memory`)"
    )


def _advice(plan: MemoryPlan, config: TrainingConfig, longest: int) -> Iterator[str]:
    """What lowers the memory of `plan`."""
    learner, prefix = config.learner, "trainer.learner."
    # Ranks of further copies leave a rank's share as it is.
    setting = "ranks" if not config.shard_ranks else "shard_ranks"
    if config.shard_ranks == config.ranks:
        setting = "ranks and trainer.shard_ranks"
    yield f"raise trainer.{setting} (now {config.ranks_of_a_copy})"
    if learner.keep_gathered and config.ranks_of_a_copy > 1:
        yield f"unset {prefix}keep_gathered"
    if not learner.gradient_checkpointing:
        yield f"set {prefix}gradient_checkpointing"
    if config.device.startswith("cuda"):
        movable = ["moments", *(["reference"] if plan.parts["reference"] else [])]
        if not set(movable) <= set(learner.offload):
            yield f"set {prefix}offload = {json.dumps(movable)}"
        if config.ranks == 1 and not learner.share_device and (plan.parts["critic"] or plan.parts["reference"]):
            yield f"set {prefix}share_device"
    if slice_tokens(config, longest) > learner.micro_batch_tokens:
        yield f"raise trainer.context_ranks (now {config.context_ranks}), which divide sequences of {longest} tokens"
    else:
        yield f"lower {prefix}micro_batch_tokens (now {learner.micro_batch_tokens})"
    yield f"lower {prefix}logits_chunk_tokens (now {learner.logits_chunk_tokens})"


class UnknownSize(ValueError):
    """A model's config.json lacks a size, or has it under another name."""


def shape_of(folder: Path) -> ModelShape:
    """The shape of the model in `folder`, from its config and the headers of its weight files.

    Raises FileNotFoundError, ValueError for an invalid file, UnknownSize.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    layers: dict[str, int] = defaultdict(int)
    outside = [0]
    for name, (spec, _) in folder_tensors(folder).items():
        if found := _LAYER.search(name):
            layers[found[1]] += prod(spec.shape)
        else:
            outside.append(prod(spec.shape))
    if not layers:
        raise ValueError(f"the weights in {folder} have no layers: no name has a number, as in model.layers.0")
    sizes = (sum(outside) + sum(layers.values()), max(layers.values()), max(outside), len(layers))
    try:
        return ModelShape(*sizes, *_widths(config))
    except KeyError as error:
        raise UnknownSize(f"the config.json of the model in {folder} has no {error}") from error


def shape_of_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape of a Qwen or Llama model with this config.json, dense or with experts; weights are not needed."""
    width, _, vocabulary = _widths(config)
    heads, head = config["num_attention_heads"], config.get("head_dim") or width // config["num_attention_heads"]
    attention = width * head * (2 * heads + 2 * config["num_key_value_heads"])
    experts = _experts(config)
    mlp = (
        3
        * width
        * (_expert_width(config) * experts + _shared_width(config) if experts else config["intermediate_size"])
    )
    layer = attention + mlp + width * experts + 2 * width
    outside = vocabulary * width * (1 if config.get("tie_word_embeddings") else 2) + width
    layers = config["num_hidden_layers"]
    return ModelShape(layers * layer + outside, layer, vocabulary * width, layers, *_widths(config))


def _experts(config: Mapping[str, Any]) -> int:
    """The experts of a layer; 0 without a mixture. transformers saves them under either name."""
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def _expert_width(config: Mapping[str, Any]) -> int:
    """The width of an expert's MLP."""
    return int(config.get("moe_intermediate_size") or config["intermediate_size"])


def _shared_width(config: Mapping[str, Any]) -> int:
    """The width of the MLP that every token passes beside its experts; 0 without one."""
    return int(config.get("shared_expert_intermediate_size") or 0)


def _widths(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Hidden size, the width of the MLPs that a token passes, and the vocabulary."""
    width = int(config.get("hidden_size") or config["n_embd"])
    mlp = config.get("intermediate_size") or config.get("n_inner") or 4 * width
    if _experts(config):
        mlp = _expert_width(config) * config.get("num_experts_per_tok", 1) + _shared_width(config)
    return width, int(mlp), int(config["vocab_size"])


LEARNER = LearnerConfig(
    precision="bfloat16", gradient_checkpointing=True, micro_batch_tokens=16_384, logits_chunk_tokens=2048
)


@dataclass(frozen=True, slots=True)
class Target:
    """A model on `nodes` machines with 8 GPUs of 80 GB each; `ranks` of the GPUs train, the others generate."""

    model: str
    nodes: int
    ranks: int
    config: dict[str, int | bool]

    def plan(self) -> MemoryPlan:
        """The memory of a rank with the settings `LEARNER`."""
        return plan_memory(shape_of_config(self.config), self.ranks, LEARNER)

    @property
    def remote_bytes(self) -> int:
        """The bytes of a version, in bfloat16, that ranks on other machines than rank 0's send to it."""
        remote = self.ranks - self.ranks // self.nodes
        return 2 * shape_of_config(self.config).parameters * remote // self.ranks


def _dense(hidden: int, mlp: int, layers: int, heads: int, key_value_heads: int) -> dict[str, int | bool]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "vocab_size": 152_064,
    }


_EXPERTS = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
TARGETS = (
    Target("Qwen2.5-7B", 1, 4, _dense(3584, 18_944, 28, 28, 4)),
    Target("Qwen2.5-32B", 4, 16, _dense(5120, 27_648, 64, 40, 8)),
    Target("Qwen2.5-72B", 16, 64, _dense(8192, 29_568, 80, 64, 8)),
    Target("Qwen3-30B-A3B", 2, 12, _dense(2048, 6144, 48, 32, 4) | _EXPERTS | {"vocab_size": 151_936}),
)
