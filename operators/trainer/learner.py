"""The learner: takes optimizer steps on a global batch and returns metrics.

The same batches from the same state give bit-identical weights at a fixed number of ranks (invariant 6): on a CPU at a
fixed number of threads, on GPUs of one kind with `deterministic`. The micro-batches are a function of the batch,
gradients are accumulated in their order, and nothing is random. With several ranks, each trains its own part of the
batch, and all take the same optimizer steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from infra.models.device_copies import move_module, synchronize
from infra.runners.step_metrics import phase
from operators.trainer.advantages import Rewards, value_targets
from operators.trainer.algorithms import AGGREGATIONS, resolve
from operators.trainer.batch import TrainingBatch, concatenate, join_parts, reject_unknown_tokens
from operators.trainer.config import LearnerConfig
from operators.trainer.context_parallel import open_context
from operators.trainer.critic import Critic
from operators.trainer.determinism import kernels
from operators.trainer.device_sharing import DeviceTurns, MoveToDevice
from operators.trainer.fused_layers import layer_kernels
from operators.trainer.global_batch_metadata import GlobalBatchMetadata, gather_metadata, gather_rows
from operators.trainer.learner_state import RANDOM_STATE, LearnerState, StateSource, check_shapes, read_into
from operators.trainer.losses import kl_penalty
from operators.trainer.metrics import TokenMetrics, batch_metrics
from operators.trainer.mismatch import Mismatch, MismatchAlarm, current_versions
from operators.trainer.packing import TrainingMicroBatch, micro_batches, mini_batches
from operators.trainer.passes import PolicyTargets, critic_gradient, policy_gradient, score_tokens
from operators.trainer.policy import PolicyModule, load_policy
from operators.trainer.presets import clip_can_bind, learning_rate, optimizer_steps, unused_settings
from operators.trainer.published_weights import PublishedWeights
from operators.trainer.ranks import ALONE, Ranks, release_gathered
from operators.trainer.trained_model import TrainedModel, reject_unmatched_groups
from schemas.records import MicroBatch

log = logging.getLogger(__name__)


class Learner:
    """Trains the model in `model_folder`, which is also the KL penalty's reference and the critic's initial trunk.

    Raises ValueError for an algorithm that lacks a setting, or a model that cannot be trained on packed sequences.
    """

    def __init__(self, config: LearnerConfig, model_folder: Path, device: str = "cpu", ranks: Ranks = ALONE) -> None:
        self.config = config
        self._device, self._ranks = torch.device(device), ranks
        self._context, self._data = open_context(ranks), ranks.of_data()
        self._algorithm = resolve(config.algorithm)
        self._mini_batches, self._epochs = optimizer_steps(config)
        home_device = torch.device("cpu") if config.share_device else self._device
        mesh = ranks.open_mesh(home_device)
        layers = layer_kernels(self._device)
        again, chunk, precision = config.gradient_checkpointing, config.logits_chunk_tokens, config.precision
        self._policy = load_policy(
            model_folder,
            home_device,
            gradient_checkpointing=again,
            chunk=chunk,
            precision=precision,
            mesh=mesh,
            lora=config.lora if config.lora.rank else None,
            keep_gathered=config.keep_gathered,
            kernels=layers,
            context_ranks=self._context.count,
        )
        self.model = self._policy.model
        """The policy; `update` changes its weights in place."""
        self.before_change: Callable[[], None] = lambda: None
        """Called before weights and moments change; it returns once nobody reads them any more."""
        self._actor = TrainedModel(self._policy, config, lambda: self.before_change())
        models: dict[str, MoveToDevice] = {"actor": self._actor.move}
        self._critic: Critic | None = None
        if self._algorithm.critic:
            self._critic = Critic(
                model_folder,
                home_device,
                gradient_checkpointing=again,
                precision=precision,
                mesh=mesh,
                keep_gathered=config.keep_gathered,
                kernels=layers,
            )
            self._critic_trained = TrainedModel(self._critic, config, lambda: self.before_change())
            models["critic"] = self._critic_trained.move
        self._reference: PolicyModule | None = None
        if config.algorithm.kl_coefficient:
            self._reference = load_policy(
                model_folder,
                home_device,
                chunk=chunk,
                precision=precision,
                mesh=mesh,
                trained=False,
                dtype=getattr(torch, config.reference_dtype),
                kernels=layers,
            )
            models["reference"] = partial(move_module, self._reference)
        shared = models if config.share_device and len(models) > 1 else ()
        offloaded = {*shared, *(name for name in models if name in config.offload)}
        self._device_turns = DeviceTurns(self._device, models, offloaded=offloaded)
        self.updates = 0
        """Batches taken, including skipped ones: the position in the critic's schedule, which the policy's follows by
        `critic.warmup_batches`."""
        self.skipped_updates = 0
        """Optimizer steps skipped because their loss or gradient was not finite."""
        self._alarm = MismatchAlarm(config.mismatch_bound)
        trained = [self._actor] if self._critic is None else [self._actor, self._critic_trained]
        reject_unmatched_groups(config, [name for model in trained for name in model.names])
        for reason in unused_settings(config, ranks.count):
            log.warning("%s", reason)

    def weights(self, dtype: torch.dtype | None = None) -> PublishedWeights:
        """The policy's full weights, as rollouts load them, one at a time."""
        return PublishedWeights(self.model, dtype, self._ranks)

    def update(self, rows: Sequence[MicroBatch]) -> dict[str, float]:
        """Train one global batch, whose parts on this rank are `rows`, and return metrics.

        Raises ValueError (see `batch.join`) for data that cannot be trained on; the learner is then as it was. A
        loss or gradient that is not finite leaves the weights as they were and is counted (`skipped_updates`).
        """
        with phase("update") as timed, kernels(self._device, deterministic=self.config.deterministic):
            metrics = self._update(rows)
            synchronize(self._device)  # the step's kernels are part of its time
        metrics["time/update"] = timed.seconds
        for name, counted in (("tokens", "batch/tokens"), ("samples", "batch/trajectories")):
            metrics[f"throughput/{name}_per_s"] = metrics[counted] / metrics["time/update"]
        return metrics

    def _update(self, rows: Sequence[MicroBatch]) -> dict[str, float]:
        batch = self._join(rows)
        metadata = gather_metadata(batch, self._data)
        kl_in_loss = self._reference is not None and self.config.algorithm.kl_in == "loss"
        can_bind = clip_can_bind(self.config, int(metadata.groups.max()) + 1)
        token_metrics = TokenMetrics(has_kl_penalty=kl_in_loss, clip_can_bind=can_bind)
        mismatch = Mismatch(current_versions(batch.versions, rows[0].batch))
        policy_updates = self.updates - (0 if self._critic is None else self.config.critic.warmup_batches)
        rewards, advantages, targets = self._score_batch(batch, metadata, token_metrics, policy_updates >= 0)
        rate = learning_rate(policy_updates, self.config) if policy_updates >= 0 else 0.0
        metrics = batch_metrics(metadata, advantages)
        if policy_updates >= 0:
            metrics |= self._train_policy(batch, metadata, targets, rate, token_metrics, mismatch)
        if self._critic is not None:
            critic_rate = learning_rate(self.updates, self.config)
            metrics |= self._train_critic(self._critic, batch, metadata, rewards, critic_rate)
        self.updates += 1
        metrics |= token_metrics.means(self._data) | mismatch.means(self._data) | self._device_turns.seconds()
        self._alarm.check(metrics)
        return metrics | {"learning_rate": rate, "skipped_updates": float(self.skipped_updates)}

    def state(self) -> LearnerState:
        """The state, as `restore` takes it: this rank's part."""
        critic = None if self._critic is None else self._critic_trained
        return LearnerState(
            weights=self._actor.weights(),
            moments=self._actor.moments(),
            random_state=torch.get_rng_state(),  # the CPU's: on a GPU nothing is drawn
            updates=self.updates,
            skipped_updates=self.skipped_updates,
            critic_weights={} if critic is None else critic.weights(),
            critic_moments={} if critic is None else critic.moments(),
        )

    def restore(self, source: StateSource) -> None:
        """Restore the state `source`, of which each rank reads its part.

        Raises ValueError if names or shapes are not this model's; nothing has changed then.
        """
        trained = {"": self._actor} if self._critic is None else {"": self._actor, "critic.": self._critic_trained}
        whose = {"": "adapters" if self.config.lora.rank else "model", "critic.": "critic"}
        own = self.state().shapes
        check_shapes(own, source.shapes, "critic.weights.", "critic")
        restored = {}
        for prefix, model in trained.items():
            check_shapes(own, source.shapes, f"{prefix}weights.", whose[prefix])
            expected = model.moment_shapes(f"{prefix}moments.")
            if begun := any(name.startswith(f"{prefix}moments.") for name in source.shapes):
                check_shapes(expected, source.shapes, f"{prefix}moments.", whose[prefix])
            restored[prefix] = begun
        for prefix, model in trained.items():
            model.clear_moments()
            moments = model.allocate_moments() if restored[prefix] else {}
            tensors = {f"{prefix}weights.{name}": tensor for name, tensor in model.weights().items()}
            read_into(source, tensors | {f"{prefix}moments.{name}": tensor for name, tensor in moments.items()})
        random_state = torch.get_rng_state()
        read_into(source, {RANDOM_STATE: random_state})
        torch.set_rng_state(random_state)
        self.updates = source.updates
        self.skipped_updates = source.skipped_updates

    def _join(self, rows: Sequence[MicroBatch]) -> TrainingBatch:
        """This rank's part of the batch, which is that of its context group. Raises ValueError on every rank if any
        rank's part cannot be trained.
        """
        try:
            batch, reason = concatenate([join_parts(each) for each in gather_rows(rows, self._context)]), None
            reject_unknown_tokens(batch, self.model.get_input_embeddings().num_embeddings)
        except ValueError as error:
            batch, reason = None, error
        if self._ranks.maximum(reason is not None):
            raise reason or ValueError("the part of another rank of this batch cannot be trained")
        assert batch is not None
        return batch

    def _score_batch(
        self, batch: TrainingBatch, metadata: GlobalBatchMetadata, token_metrics: TokenMetrics, trains_policy: bool
    ) -> tuple[Rewards, Tensor, PolicyTargets]:
        """Score the batch with every model that the algorithm needs, one at a time, before any of them changes.
        Without a step of the policy, actor and reference are needed for a KL penalty in the reward alone.

        Returns rewards and advantages of the global batch, and the training targets of this rank's tokens.
        """
        config, algorithm, ranks = self.config.algorithm, self._algorithm, self._data
        tokens, trained_rows = int(batch.trained.sum()), np.flatnonzero(batch.trained)

        def scores(model: PolicyModule | Critic, score: Callable[[TrainingMicroBatch], Tensor]) -> Tensor:
            found = score_tokens(score, self._micro_batches(batch, trained_rows), tokens)
            release_gathered(model)  # with `keep_gathered` it would stay whole beside the next model
            return found

        def logprobs(policy: PolicyModule) -> Tensor:
            return scores(policy, lambda part: policy(part.packed)[0])

        reference = proximal = values = penalties = None
        kl_in_reward = self._reference is not None and config.kl_in == "reward"
        if self._reference is not None and (trains_policy or kl_in_reward):
            with self._device_turns.turn("reference"):
                reference = logprobs(self._reference)
        # With a single step π_o is the current policy, so it needs no forward pass of its own.
        several_steps = trains_policy and self._mini_batches * self._epochs > 1
        if algorithm.proximal == "update_start" and (several_steps or kl_in_reward):
            with self._device_turns.turn("actor"):
                proximal = logprobs(self._policy)
        if self._critic is not None:
            critic = self._critic
            with self._device_turns.turn("critic"):
                own_values = scores(critic, lambda part: critic(part.packed))
            values = torch.cat(ranks.gather(own_values)).double()
        if kl_in_reward:
            assert reference is not None
            before = torch.from_numpy(batch.behaviour[batch.loss_mask]) if proximal is None else proximal
            # In float64: float32 rounding loses k3 of a small difference, and group normalisation magnifies the error.
            local_divergence = kl_penalty(before.double(), reference.double(), config.kl_kind)
            divergence = torch.cat(ranks.gather(local_divergence))
            token_metrics.record("kl/ref", divergence)
            penalties = config.kl_coefficient * divergence
        columns = (metadata.context_rewards, metadata.groups[metadata.sequences], metadata.context_trained)
        outcomes, groups, lengths, sequences = map(torch.from_numpy, (*columns, metadata.sequences))
        rewards = Rewards(outcomes, groups, lengths, penalties, values, sequences)
        advantages = algorithm.advantage(rewards, config)
        targets = PolicyTargets(
            advantages=advantages[metadata.tokens],
            proximal=proximal if several_steps else None,
            reference=None if kl_in_reward else reference,
        )
        return rewards, advantages, targets

    def _train_policy(
        self,
        batch: TrainingBatch,
        metadata: GlobalBatchMetadata,
        targets: PolicyTargets,
        rate: float,
        token_metrics: TokenMetrics,
        mismatch: Mismatch,
    ) -> dict[str, float]:
        """Take the policy's optimizer steps; `loss` is their mean, `grad_norm` the largest."""
        losses: list[float] = []
        norms: list[float] = []
        rows_with_gradient = self._rows_with_gradient(batch, targets)
        with self._device_turns.turn("actor"):
            for rows in self._step_rows(metadata):
                self._actor.zero_grad()
                trained = np.intersect1d(self._local_rows(rows, metadata), rows_with_gradient, assume_unique=True)
                loss = policy_gradient(
                    self._policy,
                    self._micro_batches(batch, trained),
                    targets,
                    self._coefficients(rows, metadata),
                    self._algorithm,
                    self.config.algorithm,
                    self._ranks.count,
                    token_metrics,
                    None if losses else mismatch,  # after the first step the weights differ
                )
                losses.append(loss)
                norms.append(self._step(self._actor, rate, loss))
        loss, skipped = self._data.total([float(np.mean(losses)), len(batch) - len(rows_with_gradient)])
        return {"loss": loss, "grad_norm": float(np.max(norms)), "batch/skipped_rows": skipped}

    def _train_critic(
        self, critic: Critic, batch: TrainingBatch, metadata: GlobalBatchMetadata, rewards: Rewards, rate: float
    ) -> dict[str, float]:
        """Take the critic's optimizer steps, over the same mini-batches."""
        assert rewards.values is not None
        returns = value_targets(rewards, self.config.algorithm)
        settings = self.config.critic
        policy_rate = self.config.learning_rate
        rate = settings.learning_rate * (rate / policy_rate if policy_rate else 1.0)
        losses: list[float] = []
        norms: list[float] = []
        with self._device_turns.turn("critic"):
            for rows in self._step_rows(metadata):
                self._critic_trained.zero_grad()
                own = self._local_rows(rows, metadata)
                loss = critic_gradient(
                    critic,
                    self._micro_batches(batch, own[batch.trained[own] > 0]),
                    rewards.values[metadata.tokens],
                    returns[metadata.tokens],
                    settings.value_clip,
                    max(1, int(metadata.trained[rows].sum())),
                    self._ranks.count,
                )
                losses.append(loss)
                norms.append(self._step(self._critic_trained, rate, loss))
        returns_variance = float(returns.var(correction=0)) if len(returns) else 0.0
        residual_variance = float((returns - rewards.values).var(correction=0)) if len(returns) else 0.0
        return {
            "critic/loss": self._data.total([float(np.mean(losses))])[0],
            "critic/grad_norm": float(np.max(norms)),
            "critic/explained_variance": 1 - residual_variance / returns_variance if returns_variance else 0.0,
        }

    def _step(self, trained: TrainedModel, rate: float, loss: float) -> float:
        """Take a step on every rank or, if the gradient or the `loss` of any rank's part is not finite, on none.

        Returns the gradient's norm, and counts a skipped step.
        """
        norm = trained.step(rate, finite=not self._ranks.maximum(not math.isfinite(loss)))
        self.skipped_updates += not math.isfinite(norm)
        return norm

    def _step_rows(self, metadata: GlobalBatchMetadata) -> Iterator[np.ndarray]:
        """The rows of the global batch that each optimizer step trains, step by step."""
        for _ in range(self._epochs):
            yield from mini_batches(metadata.groups, self._mini_batches)

    def _coefficients(self, rows: np.ndarray, metadata: GlobalBatchMetadata) -> Tensor:
        """The aggregation's coefficients of this rank's sequences, float64[n]; 0 for sequences not in `rows`."""
        aggregation = AGGREGATIONS[self._algorithm.aggregation]
        coefficients = torch.zeros(len(metadata), dtype=torch.float64)
        coefficients[rows] = aggregation(
            torch.from_numpy(metadata.trained[rows]), self.config.algorithm.max_response_tokens
        )
        return coefficients[metadata.rows]

    def _local_rows(self, rows: np.ndarray, metadata: GlobalBatchMetadata) -> np.ndarray:
        """The `rows` of this rank, as indices into its own batch."""
        return rows[(rows >= metadata.rows.start) & (rows < metadata.rows.stop)] - metadata.rows.start

    def _micro_batches(self, batch: TrainingBatch, rows: np.ndarray) -> Iterator[TrainingMicroBatch]:
        return micro_batches(batch, rows, self.config.micro_batch_tokens, self._device, self._ranks, self._context)

    def _rows_with_gradient(self, batch: TrainingBatch, targets: PolicyTargets) -> np.ndarray:
        """The sequences whose loss has a gradient: those with a trained token if the loss has a KL penalty, else those
        with a nonzero advantage. The coefficients still count the others."""
        if targets.reference is not None:
            return np.flatnonzero(batch.trained)
        sequences = np.repeat(np.arange(len(batch)), batch.trained)
        return np.unique(sequences[targets.advantages.numpy() != 0])
