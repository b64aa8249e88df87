"""The learner: a global batch in, one optimizer update, metrics out.

The same batches from the same state give bit-identical weights on a CPU at a fixed number of threads (invariant 6): the
micro-batches are a function of the batch, gradients add up in their order, and nothing is drawn at random.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from infra.models.weights import weight_tensors
from operators.trainer.algorithms import AGGREGATIONS, resolve
from operators.trainer.batch import TrainingBatch, join
from operators.trainer.config import LearnerConfig
from operators.trainer.losses import PolicyLogprobs, correction_weights, kl_penalty
from operators.trainer.metrics import TokenMetrics, batch_metrics
from operators.trainer.optimizer import build_optimizer, learning_rate, moments, restore_moments
from operators.trainer.packing import TrainingMicroBatch, micro_batches
from operators.trainer.policy import load_policy, token_logprobs
from schemas.records import MicroBatch


@dataclass(frozen=True, slots=True, eq=False)
class LearnerState:
    """All that a learner is: weights and optimizer moments by name, torch's random state, and how many updates it has
    made.

    Tensors are the learner's own, not copies: write or copy them before the next update.
    """

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    random_state: Tensor
    updates: int
    skipped_updates: int


class Learner:
    """Trains the model in `model_folder`, which is also the reference of a KL penalty.

    Raises ValueError for an algorithm that lacks a setting, or a model that cannot be trained on packed sequences.
    """

    def __init__(self, config: LearnerConfig, model_folder: Path, device: str = "cpu") -> None:
        self.config = config
        self._device = torch.device(device)
        self._algorithm = resolve(config.algorithm)
        self._model = load_policy(model_folder, self._device)
        self._reference = load_policy(model_folder, self._device) if config.algorithm.kl_coefficient else None
        self._parameters = dict(self._model.named_parameters())  # tied weights once
        self._optimizer = build_optimizer(self._parameters, config)
        stop = self._model.generation_config.eos_token_id if self._model.generation_config else None
        self._stop_token_ids = [stop] if isinstance(stop, int) else list(stop or ())
        self._updates = 0
        self._skipped_updates = 0

    @property
    def updates(self) -> int:
        """Batches taken, those whose gradient was not finite included: the position of the learning rate's schedule."""
        return self._updates

    @property
    def model(self) -> PreTrainedModel:
        """The policy; `update` changes its weights in place."""
        return self._model

    def update(self, rows: Sequence[MicroBatch]) -> dict[str, float]:
        """Train one global batch, whose parts are `rows`, and say how it went.

        Raises ValueError (see `batch.join`) for data that cannot be trained on; the learner is then as it was. A
        gradient that is not finite leaves the weights as they were and is counted (`skipped_updates`).
        """
        started = time.perf_counter()
        batch = join(rows)
        lengths = torch.from_numpy(batch.trained)
        algorithm = self._algorithm
        advantages = algorithm.advantage(
            torch.from_numpy(batch.rewards), torch.from_numpy(batch.groups), lengths, self.config.algorithm
        )
        coefficients = AGGREGATIONS[algorithm.aggregation](lengths, self.config.algorithm.max_response_tokens)
        observed = TokenMetrics()
        loss = 0.0
        self._optimizer.zero_grad()
        used = self._rows_with_gradient(batch, advantages)
        for part in micro_batches(batch, used, advantages, coefficients, self.config.micro_batch_tokens, self._device):
            loss += self._accumulate(part, observed)
        metrics = {
            **batch_metrics(batch, advantages, self._stop_token_ids),
            **observed.means(),
            **self._step(),
            "loss": loss,
            "batch/skipped_rows": float(len(batch) - len(used)),
        }
        metrics["time/update"] = time.perf_counter() - started
        metrics["throughput/trainer_tokens_per_s"] = metrics["batch/tokens"] / metrics["time/update"]
        return metrics

    def state(self) -> LearnerState:
        """What `restore` needs to go on as if nothing had happened."""
        return LearnerState(
            weight_tensors(self._model),
            moments(self._optimizer, self._parameters),
            torch.get_rng_state(),
            self._updates,
            self._skipped_updates,
        )

    def restore(self, state: LearnerState) -> None:
        """Become the learner that gave `state`. Raises ValueError where names or shapes are not this model's."""
        own = weight_tensors(self._model)
        wrong = set(state.weights) ^ set(own)
        wrong |= {name for name in set(own) - wrong if state.weights[name].shape != own[name].shape}
        if wrong:
            raise ValueError(f"the state's weights do not fit the model: {', '.join(sorted(wrong)[:3])}")
        restore_moments(self._optimizer, self._parameters, state.moments)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state.weights[name])
        torch.set_rng_state(state.random_state)
        self._updates = state.updates
        self._skipped_updates = state.skipped_updates

    def _rows_with_gradient(self, batch: TrainingBatch, advantages: Tensor) -> np.ndarray:
        """The sequences whose loss has a gradient: with a KL penalty all that have a trained token, else those of which
        some advantage is not 0. The coefficients count the others all the same."""
        if self._reference is not None:
            return np.flatnonzero(batch.trained)
        sequences = np.repeat(np.arange(len(batch)), batch.trained)
        return np.unique(sequences[advantages.numpy() != 0])

    def _accumulate(self, part: TrainingMicroBatch, observed: TokenMetrics) -> float:
        """Add the gradient of one micro-batch and return its share of the loss."""
        algorithm = self._algorithm
        chunk = self.config.logits_chunk_tokens
        current, entropies = token_logprobs(self._model, part.packed, chunk, with_entropy=True)
        # One update a batch: the policy that the update began with is the one at hand, so π_o costs no pass of its own.
        proximal = part.behaviour if algorithm.proximal == "behaviour" else current.detach()
        policy = PolicyLogprobs(current, proximal, part.behaviour, part.segments, part.sequences)
        weights = correction_weights(policy, algorithm.correction)
        losses = weights * algorithm.loss(policy, part.advantages, algorithm.clip)
        penalty = None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = token_logprobs(self._reference, part.packed, chunk)
            penalty = kl_penalty(current, reference)
            losses = losses + self.config.algorithm.kl_coefficient * penalty
        loss = (part.coefficients * losses).sum()
        torch.autograd.backward(loss)
        assert entropies is not None
        observed.add(policy, part.advantages, weights, entropies, algorithm.clip, penalty)
        return float(loss.detach())

    def _step(self) -> dict[str, float]:
        """Clip the gradient and take the optimizer's step, or skip both where the gradient is not finite."""
        for parameter in self._parameters.values():
            if parameter.grad is None:  # a batch in which every row was skipped still decays moments and weights
                parameter.grad = torch.zeros_like(parameter)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), self.config.max_gradient_norm))
        rate = learning_rate(self._updates, self.config)
        if math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        else:
            self._skipped_updates += 1
        self._updates += 1
        return {"grad_norm": norm, "learning_rate": rate, "skipped_updates": float(self._skipped_updates)}
