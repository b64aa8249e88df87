"""The policy model as the trainer uses it: packed sequences in, logprobs of the trained tokens out."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from infra.models.empty_model import allocate, empty_model, read_weights
from infra.models.sizes import readable_config
from operators.trainer.config import WITH_CRITIC, LearnerConfig, LoraConfig, Precision
from operators.trainer.context_parallel import check_heads
from operators.trainer.fused_layers import LayerKernels, fuse_layers
from operators.trainer.lora import add_adapters, initialise_adapters, stored_name
from operators.trainer.packed_attention import PACKED
from operators.trainer.packing import PackedTokens, pack_tokens
from operators.trainer.ranks import shard
from operators.trainer.token_scores import token_scores
from operators.trainer.trained_model import reject_unmatched_groups


def trainable_model(folder: Path, *, gradient_checkpointing: bool) -> PreTrainedModel:
    """The causal language model in `folder`, float32, without weights (see `infra/models/empty_model.py`), in
    evaluation mode (no dropout: π must be the rollout's distribution).

    Raises ValueError for a model of more than text, for one with sliding-window layers, and for one that does not
    support `gradient_checkpointing` if it is set.
    """
    if readable_config(folder).get("text_config"):
        raise ValueError(
            f"the config.json of the model in {folder} has a text_config: only models of text alone can be trained"
        )
    model = empty_model(folder)
    other = set(getattr(model.config, "layer_types", None) or ()) - {"full_attention"}
    if other:
        raise ValueError(
            f"the model in {folder} has {', '.join(sorted(other))} layers: only full attention can be trained"
        )
    layers = layers_of(model) if gradient_checkpointing else []
    if gradient_checkpointing and not layers:
        raise ValueError(f"the model in {folder} does not support gradient_checkpointing: unset it")
    for layer in layers:  # transformers' own needs layers in training mode, in which some apply dropout
        # Nothing is random in evaluation mode, so no layer saves and sets the states of random generators.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    return model


def check_trainable(folder: Path, config: LearnerConfig, context_ranks: int) -> None:
    """Raise ValueError or OSError if a learner would refuse the model in `folder`, as far as that is known without its
    weights."""
    model = trainable_model(folder, gradient_checkpointing=config.gradient_checkpointing)
    check_heads(model.config, context_ranks)
    if config.lora.rank:
        add_adapters(model, config.lora)
    if config.algorithm.name not in WITH_CRITIC:  # whose parameters a group may match
        reject_unmatched_groups(config, [name for name, each in model.named_parameters() if each.requires_grad])


def load_policy(
    folder: Path,
    device: torch.device,
    *,
    gradient_checkpointing: bool = False,
    chunk: int = 1 << 30,
    precision: Precision = "float32",
    mesh: DeviceMesh | None = None,
    trained: bool = True,
    dtype: torch.dtype = torch.float32,
    lora: LoraConfig | None = None,
    keep_gathered: bool = False,
    kernels: LayerKernels | None = None,
    context_ranks: int = 1,
) -> PolicyModule:
    """The policy with the weights in `folder`, sharded over `mesh`. A collective: every rank must call it.

    `trained` False: a reference, whose weights have no gradient. `dtype` is that of the weights. With `lora` only
    adapters are trained. `keep_gathered` is that of `ranks.shard`, and `kernels` are those of `fuse_layers`. Raises
    ValueError as `trainable_model`, for a model whose heads `context_ranks` cannot divide, before weights are read, and
    for one whose packed logprobs differ from its own forward's (attention with a soft cap, scaled logits).
    """
    model = trainable_model(folder, gradient_checkpointing=gradient_checkpointing)
    check_heads(model.config, context_ranks)
    if not trained:
        model.requires_grad_(False)
    if lora is not None:
        add_adapters(model, lora)
    policy = PolicyModule(model, chunk, precision)
    place(policy, model, folder, device, mesh, precision, dtype=dtype, keep_gathered=keep_gathered)
    if lora is not None:
        initialise_adapters(model, lora)
    if not trained:
        model.set_attn_implementation(PACKED)
        fuse_layers(model, kernels)
        return policy
    register_fsdp_forward_method(policy, "plain_logprobs")
    try:
        expected = policy.plain_logprobs(device)
        model.set_attn_implementation(PACKED)
        fuse_layers(model, kernels)
        with torch.no_grad():
            check_packed(policy(packed_contexts(model, device))[0], expected, precision)
    except (ValueError, TypeError) as error:  # TypeError: a forward without attention keywords
        raise ValueError(f"the model in {folder} cannot be trained: {error}") from error
    return policy


def place(
    module: nn.Module,
    model: PreTrainedModel,
    folder: Path,
    device: torch.device,
    mesh: DeviceMesh | None,
    precision: Precision,
    *,
    dtype: torch.dtype = torch.float32,
    keep_gathered: bool = False,
) -> None:
    """Shard `module`, whose parameters are on the meta device, allocate this rank's part and read it from `folder`.

    `model` is in `module`, or has its transformer there.
    """
    if mesh is None and precision == "bfloat16":
        # The grouped kernel for experts computes in the weights' dtype, which is float32, not in autocast's.
        model.set_experts_implementation("eager")
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    separate = [] if output is None or output.weight is embedding.weight else [embedding]
    shard(module, [*layers_of(module), *separate], mesh, precision, keep_gathered)
    allocate(module, device, dtype)
    read_weights(model, folder, stored_name)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformer, in order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def hidden_states(trunk: nn.Module, packed: PackedTokens) -> Tensor:
    """The last hidden states at the m predictors, float[m, width]."""
    hidden: Tensor = trunk(
        input_ids=packed.token_ids, position_ids=packed.layout.positions, use_cache=False, packed=packed.layout
    ).last_hidden_state.squeeze(0)
    return hidden.index_select(0, packed.predictors)


def token_logprobs(
    model: PreTrainedModel, packed: PackedTokens, chunk: int, *, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Logprobs in nats of `packed.targets`, float32[m] with gradient, and with `with_entropy` the entropies, without
    gradient. Both are of the softmax of logits / temperature, from which the rollout sampled.

    Logits are computed for the m predictors only, at most `chunk` at once. If there are more, backward recomputes each
    chunk, so that memory does not grow with m times the vocabulary.
    """
    hidden = hidden_states(model.base_model, packed)
    head = model.get_output_embeddings()
    if len(hidden) <= chunk:
        logprobs, entropies = _score(hidden, packed.targets, packed.temperatures, head, with_entropy)
        return logprobs, entropies if with_entropy else None
    targets = torch.split(packed.targets, chunk)
    temperatures = [None] * len(targets) if packed.temperatures is None else torch.split(packed.temperatures, chunk)
    parts = [
        checkpoint(_score, *part, head, with_entropy, use_reentrant=False, preserve_rng_state=False)
        for part in zip(torch.split(hidden, chunk), targets, temperatures, strict=True)
    ]
    logprobs = torch.cat([logprobs for logprobs, _ in parts])
    return logprobs, torch.cat([entropies for _, entropies in parts]) if with_entropy else None


def activations(packed: PackedTokens, precision: Precision) -> torch.autocast:
    """The autocast context of one forward pass with activations of `precision`.

    Each pass needs its own context: autocast caches rounded weights until its outermost context ends, so a context that
    spans an optimizer step would use the weights from before the step.
    """
    return torch.autocast(packed.token_ids.device.type, torch.bfloat16, enabled=precision == "bfloat16")


class PolicyModule(nn.Module):
    """A module that computes logprobs. FSDP requires that a model split over ranks is called as one module."""

    def __init__(self, model: PreTrainedModel, chunk: int, precision: Precision = "float32") -> None:
        super().__init__()
        self.model, self._chunk, self._precision = model, chunk, precision

    def forward(self, packed: PackedTokens, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """`token_logprobs` of `packed`; in a context group of all its predictors."""
        with activations(packed, self._precision):
            logprobs, entropies = token_logprobs(self.model, packed, self._chunk, with_entropy=with_entropy)
        if entropies is not None:
            entropies = packed.gather(entropies)
        return packed.gather(logprobs.clone()), entropies  # FSDP's hooks do not accept a view

    @torch.no_grad()
    def plain_logprobs(self, device: torch.device) -> Tensor:
        """The logprobs of `contexts` by the model's own forward, before its attention is replaced."""
        each = [context.to(device) for context in contexts(self.model)]
        with torch.autocast(device.type, torch.bfloat16, enabled=self._precision == "bfloat16"):
            return torch.cat(
                [target_logprobs(self.model(input_ids=ids[None], use_cache=False).logits[0], ids) for ids in each]
            )


def _score(
    hidden: Tensor, targets: Tensor, temperatures: Tensor | None, head: nn.Module, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    return token_scores(head(hidden), targets, temperatures, with_entropy=with_entropy)


_LENGTHS = (7, 3, 5)
TOLERANCE: dict[Precision, float] = {"float32": 1e-4, "bfloat16": 3e-2}
"""Allowed difference of logprobs, relative to the largest. Rounding in another order stays below it, also in deep
models; a wrong mask, position or logit scale does not."""


def contexts(model: PreTrainedModel) -> list[Tensor]:
    """Random contexts for `model`, the same on every rank, int64[n] each."""
    source = np.random.default_rng(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    return [torch.from_numpy(source.integers(0, vocabulary, length)) for length in _LENGTHS]


def packed_contexts(model: PreTrainedModel, device: torch.device) -> PackedTokens:
    """The `contexts` as one packed sequence."""
    later = np.concatenate([np.arange(length) > 0 for length in _LENGTHS])
    return pack_tokens(torch.cat(contexts(model)).numpy(), later, np.array(_LENGTHS), device)


def target_logprobs(logits: Tensor, context: Tensor) -> Tensor:
    """The logprobs of all tokens of `context` but the first, from the `logits` [tokens, vocabulary] of a forward."""
    return logits[:-1].float().log_softmax(-1).gather(1, context[1:, None])[:, 0]


def check_packed(packed: Tensor, plain: Tensor, precision: Precision) -> None:
    """Raise ValueError unless the logprobs `packed` equal `plain`, those of the model's own forward."""
    worst = float((packed - plain).abs().max() / plain.abs().max())
    if not worst <= TOLERANCE[precision]:
        raise ValueError(
            f"its packed logprobs differ from those of its own forward by {worst:.1g} of the largest: the model "
            "has features other than causal attention within a sequence and an output layer"
        )
