"""The transformers engine: continuous batching over a Hugging Face causal language model in this process.

A step preempts the rows that exceed the KV capacity, admits waiting requests to the free rows, computes the new prompts
and the next logits of every row in one pass, draws one token per row, and removes the finished rows. No request waits
for the longest row.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedModel

from infra.models.weights import load_weights
from operators.rollout.direct_layers import LlamaModules
from operators.rollout.direct_runner import DirectRunner
from operators.rollout.engine import KV, Completion, EngineStatus, PartialResponse, Request
from operators.rollout.forward_cost import measure_forward_cost
from operators.rollout.forward_runner import ForwardRunner, kv_geometry
from operators.rollout.kv_rows import RowCopy
from operators.rollout.kv_slots import KVSlots
from operators.rollout.llama_layout import unsupported_reason
from operators.rollout.model_context import check_context
from operators.rollout.random_streams import uniforms
from operators.rollout.request_checks import check_loadable
from operators.rollout.runner import DraftRunner, KVStorage, Runner, RunnerLost, max_logit_difference, tolerance
from operators.rollout.sampling import sample
from operators.rollout.sampling_columns import NO_TOKEN
from operators.rollout.scheduler import Scheduler, SchedulerConfig
from operators.rollout.speculation import NO_DRAFT, Counts, Speculator
from operators.rollout.step_plan import Decode, Prefill, Verify, plan_extension, plan_prefill
from operators.rollout.token_rows import TokenRows
from schemas.records import PolicyVersion

log = logging.getLogger(__name__)

MAX_PREFILL_TOKENS = 4096
"""Maximum prefill tokens of one pass, which bounds its activations; more need further passes."""


class TransformersEngine:
    """An `Engine` over `model`, which it owns: it fuses the model's weights and overwrites them in `load`.

    At most `slots` requests run at once, of at most `context` tokens each (default: the model's maximum position);
    `kv_capacity` bounds their tokens together (default: slots × context; at least one context). `version` is that of
    the model's initial weights, or None. With `direct` false every pass uses the model's own forward; `fixed` is
    DirectRunner's. With `speculation` steps of few rows verify drafts, which changes no token. Raises ValueError for a
    model that cannot run over KV slots: sliding-window attention shorter than the context, layers of different KV
    shapes, or logits that differ from its plain forward.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        context: int | None = None,
        kv_capacity: int | None = None,
        version: PolicyVersion | None = None,
        direct: bool = True,
        fixed: bool | None = None,
        speculation: bool = False,
    ) -> None:
        self.model = model.eval()
        """The model, whose weights may be only in part those of a version while the engine is `staged`."""
        context = check_context(model, context)
        vocabulary = model.get_input_embeddings().num_embeddings
        capacity = slots * context if kv_capacity is None else kv_capacity
        config = SchedulerConfig(slots, context, capacity, vocabulary)
        self._scheduler = Scheduler(config, TokenRows(slots, context))
        layers, heads, head_size = kv_geometry(model)
        self.slots, self.context, self._layers = slots, context, layers
        self._slots = KVSlots(
            layers=layers,
            rows=slots,
            heads=heads,
            context=context,
            head_size=head_size,
            dtype=model.dtype,
            device=model.device,
        )
        self._own_runner = self._choose_runner(direct, fixed)
        self._runner, self._kv = cast(Runner, self._own_runner), cast(KVStorage, self._slots)
        self._speculator: Speculator | None = None
        if speculation:
            self._speculator = Speculator(measure_forward_cost(self._own_runner, slots, context))
        self.lost: RunnerLost | None = None
        """Why it computes nothing until `relocate`; None if it can compute."""
        self._confirmed = 0
        """How many of the first rows have KV while the runner is lost."""
        self.version = version
        """The weight version loaded, None before the first."""
        self._tokens_generated = 0
        self._model_seconds = 0.0
        self._started: list[str] = []
        self._provided_kv: dict[str, KV] = {}
        """The KV provided with requests that have not started."""

    @property
    def direct(self) -> bool:
        """Whether passes use the model's modules directly, not its forward."""
        return isinstance(self._own_runner, DirectRunner)

    @property
    def modules(self) -> LlamaModules | None:
        """The model's modules, if passes use them directly."""
        return self._own_runner.modules if isinstance(self._own_runner, DirectRunner) else None

    @property
    def staged(self) -> bool:
        """Whether it computes with a runner in several processes."""
        return self._runner is not self._own_runner

    @property
    def unused_slots(self) -> KVSlots | None:
        """The KV memory of the whole model while the engine does not compute with it; None if it does."""
        return self._slots if self.staged or self.version is None else None

    @property
    def speculation(self) -> Counts:
        """What speculation has done so far."""
        return Counts() if self._speculator is None else self._speculator.counts

    def load(self, weights: Path, version: PolicyVersion) -> None:
        """Replace the weights in place with the safetensors file `weights`, rounded to the model's precision.

        Raises RuntimeError while requests are running or waiting, ValueError if names or shapes do not match; the
        weights are then unchanged.
        """
        check_loadable(self.status(), version)
        if self.staged:
            raise RuntimeError(f"version {version} cannot be loaded: the engine runs in stages")
        load_weights(self.model, weights, rounds=True)
        self.version = version

    def relocate(self, runner: Runner, kv: KVStorage, version: PolicyVersion) -> None:
        """Compute with `runner` over `kv` from now on, under the same `version`. Requests continue with their KV.

        Lost KV is computed again, and only the missing layers of it are stored. Raises RunnerLost if
        `runner` is lost meanwhile; nothing has changed then.
        """
        rows = self._scheduler.rows
        confirmed = rows.count if self.lost is None else self._confirmed
        incomplete: dict[frozenset[int], list[int]] = {}
        with torch.inference_mode():
            for row in range(rows.count):
                tokens = int(rows.length[row]) - 1
                layers = self._kv.read_row(row, tokens) if row < confirmed and tokens else {}
                stored = kv.write_row(row, tokens, tokens, layers) if layers else set()
                if tokens and len(stored) < self._layers:
                    incomplete.setdefault(frozenset(range(self._layers)) - stored, []).append(row)
            for missing, these in incomplete.items():
                known = [rows.known_tokens(row)[:-1] for row in these]
                for block in plan_prefill(known, these, MAX_PREFILL_TOKENS):
                    runner.prefill([block], missing)
        self._runner, self._kv, self.version, self.lost = runner, kv, version, None

    def complete(self, weights: Path, version: PolicyVersion) -> None:
        """Load the rest of `version`, of which the engine runs a part in stages, and run all of it here.

        Raises RuntimeError for another version than that of the engine.
        """
        if version != self.version:
            raise RuntimeError(f"the engine runs version {self.version}, not {version}")
        load_weights(self.model, weights, rounds=True)
        self.relocate(self._own_runner, self._slots, version)

    def leave_stages(self) -> None:
        """Forget the runner in several processes and its version. Raises RuntimeError while there are requests."""
        if not self._scheduler.idle:
            raise RuntimeError("the engine has requests: it cannot leave its stages")
        self._runner, self._kv, self.version, self.lost = self._own_runner, self._slots, None, None

    def submit(self, request: Request) -> None:
        """Queue a request; it starts when a slot and KV capacity are free.

        Raises ValueError for an empty prompt, a prompt that leaves no room for a token, unknown token ids, sampling
        parameters out of range, or a trajectory that the engine has. A partial response that has already finished
        completes unchanged in the next step.
        """
        partial = request.partial
        self._scheduler.add(request if partial is None else replace(request, partial=replace(partial, kv=None)))
        if partial is not None and partial.kv is not None:
            self._provided_kv[request.trajectory_id] = partial.kv

    def step(self) -> Sequence[Completion]:
        """Run one round and return the requests that finished in it; an empty engine returns at once.

        If its runner is lost, the round is repeated after `relocate`.
        """
        completions = self._scheduler.take_finished()
        for completion in completions:
            self._provided_kv.pop(completion.trajectory_id, None)
        if self.lost is not None:
            return completions
        self._confirmed = self._scheduler.rows.count
        before = time.thread_time()
        try:
            return [*completions, *self._round()]
        except RunnerLost as error:
            log.warning("the engine pauses: %s", error)
            self.lost = error
            self._started += self._scheduler.admitted
            return completions
        finally:
            self._model_seconds += time.thread_time() - before

    def _round(self) -> list[Completion]:
        with torch.inference_mode():
            self._kv.copy(self._scheduler.preempt())
            self._confirmed = self._scheduler.rows.count
            blocks = self._start(self._scheduler.admit())
            rows = self._scheduler.rows
            count = rows.count
            if not count:
                return []
            generated = int(rows.generated[:count].sum())
            draft = None if blocks else self._draft()
            found = self._decode(blocks) if draft is None else self._verify(draft)
            self._tokens_generated += int(rows.generated[:count].sum()) - generated
            ended = {row: self._with_kv(row, each) for row, each in found.items()}
            self._started += self._scheduler.admitted
            if self._speculator is not None:
                for row, each in ended.items():
                    self._speculator.finish(rows.requests[row], each.generated.token_ids)
            self._kv.copy(self._scheduler.remove_rows(ended))
            self._reorder(count)
        return list(ended.values())

    def _decode(self, blocks: Sequence[Prefill]) -> dict[int, Completion]:
        """Compute `blocks` and draw one token for every row; returns the completions by row."""
        rows, count = self._scheduler.rows, self._scheduler.rows.count
        step = Decode(rows.last_token[:count].copy(), rows.length[:count] - 1)
        logits = self._runner.decode(step, blocks)
        token_ids, logprobs = sample(logits, rows.sampling, uniforms(rows.keys, rows.generated[:count]))
        if (failed := np.flatnonzero(token_ids == NO_TOKEN)).size:
            self._kv.clear(failed.tolist())
        return rows.record(token_ids, logprobs)

    def _draft(self) -> np.ndarray | None:
        """The drafts to verify in this step; None for a plain step."""
        if self._speculator is None or self.staged:
            return None
        scheduler = self._scheduler
        return self._speculator.propose(scheduler.rows, scheduler.config.kv_capacity - scheduler.kv_used)

    def _verify(self, draft: np.ndarray) -> dict[int, Completion]:
        """Draw after each token of `draft`, int64[count, n], as `Speculator.propose` returns it; accept what agrees.

        A row whose logits are not finite gains nothing: the next step draws its token without a draft.
        """
        assert self._speculator is not None
        rows, (count, steps) = self._scheduler.rows, draft.shape
        at = rows.length[:count] - 1 + np.arange(steps)[:, None]
        # Behind its limit a row has no tokens. Its last position is never read, so all that is left over goes there.
        verify = Verify(np.where(draft == NO_DRAFT, 0, draft).T, np.minimum(at, self.context - 1))
        logits = self._own_runner.verify(verify)
        draws = uniforms(np.tile(rows.keys, steps), (rows.generated[:count] + np.arange(steps)[:, None]).ravel())
        token_ids, logprobs = (
            each.reshape(steps, count).T for each in sample(logits, rows.sampling.repeated(steps), draws)
        )
        broken = np.flatnonzero((token_ids == NO_TOKEN).any(1))
        for row in broken.tolist():
            self._slots.clear_from(row, int(rows.length[row]) - 1)
        completions, agreed = rows.record_verified(draft, token_ids, logprobs)
        self._speculator.observe(rows, draft, agreed, broken=broken.size > 0)
        return completions

    def _with_kv(self, row: int, ended: Completion) -> Completion:
        """`ended`, with the KV of its row if the request has `keep_kv`."""
        rows = self._scheduler.rows
        if not rows.requests[row].keep_kv or ended.finish_reason == "failed" or self.staged:
            return ended
        return replace(
            ended, generated=replace(ended.generated, kv=self._kv.export_row(row, int(rows.length[row]) - 1))
        )

    def take_started(self) -> Sequence[str]:
        """Requests whose first token was generated here since the last call, finished ones included."""
        started, self._started = self._started, []
        return started

    def due(self) -> float:
        """0 while there are requests that it can compute, infinite otherwise."""
        return math.inf if self._scheduler.idle or self.lost is not None else 0.0

    def release(self, trajectory_ids: Collection[str], *, with_kv: bool = False) -> dict[str, PartialResponse]:
        """Stop these requests and return their partial responses, on request with KV; unknown ids are left out."""
        provided = {name: self._provided_kv.pop(name) for name in trajectory_ids if name in self._provided_kv}
        kv = provided if with_kv else {}
        lengths = self._scheduler.rows.length
        confirmed = self._scheduler.rows.count if self.lost is None else self._confirmed
        with torch.inference_mode():
            if with_kv:
                running = self._scheduler.running_rows(trajectory_ids)
                rows = {name: row for name, row in running.items() if row < confirmed}
                kv |= {name: self._kv.export_row(row, int(lengths[row]) - 1) for name, row in rows.items()}
            released, moves = self._scheduler.release(trajectory_ids)
            self._kv.copy(moves)
        self._confirmed = min([confirmed, *(move.target for move in moves if move.source >= confirmed)])
        return {name: replace(partial, kv=kv.get(name)) for name, partial in released.items()}

    def generated(self, since: Mapping[str, int]) -> dict[str, PartialResponse]:
        """The tokens of these requests from position `since[id]` on; unknown ids are left out."""
        return self._scheduler.generated(since)

    def status(self) -> EngineStatus:
        """The present load."""
        status, counts = self._scheduler.status(self._tokens_generated), self.speculation
        drafted, accepted = counts.drafted, counts.accepted
        return replace(status, model_seconds=self._model_seconds, drafted=drafted, accepted=accepted)

    def close(self) -> None:
        """Free the engine's resources; afterwards it can only be closed again."""
        self.__dict__.clear()

    def _choose_runner(self, direct: bool, fixed: bool | None) -> DraftRunner:
        reason = unsupported_reason(self.model) if direct else "requested"
        if reason is None:
            runner: DraftRunner = DirectRunner(self.model, self._slots, fixed=fixed)
            difference = self._check(runner)
            if difference <= tolerance(self.model.dtype):
                return runner
            reason = f"with the direct runner its logits differ by {difference:.1e} of the largest"
        if direct:
            log.warning("%s uses its own forward, which is slower: %s", type(self.model).__name__, reason)
        runner = ForwardRunner(self.model, self._slots)
        difference = self._check(runner)
        if difference > tolerance(self.model.dtype):
            raise ValueError(
                f"{type(self.model).__name__} cannot run over KV slots: its logits differ by {difference:.1e} of "
                "the largest from those of its plain forward"
            )
        return runner

    def _check(self, runner: Runner) -> float:
        config = self._scheduler.config
        return max_logit_difference(runner, self.model, config.slots, config.context)

    def _start(self, new: range) -> list[Prefill]:
        """Plan the prefill of rows `new`: import provided KV, copy prompts of running rows; returns the remaining
        blocks."""
        if not new:
            return []
        rows = self._scheduler.rows
        prompts = {rows.requests[row].prompt.tobytes(): row for row in range(new.start)}
        contexts, targets, extensions = [], [], []
        for row in new:
            request = rows.requests[row]
            provided = self._provided_kv.pop(request.trajectory_id, None)
            last = int(rows.length[row]) - 1
            if provided is not None and self._kv.import_row(row, provided, last):
                if provided.tokens < last:
                    extensions.append(
                        plan_extension(rows.known_tokens(row)[provided.tokens : -1], row, provided.tokens)
                    )
                continue
            source = prompts.get(request.prompt.tobytes())
            if rows.length[row] == 1:
                continue
            if source is not None and rows.generated[row] == 0:
                self._kv.copy([RowCopy(source, row, len(request.prompt) - 1)])
                continue
            contexts.append(rows.known_tokens(row)[:-1])
            targets.append(row)
        blocks = [*extensions, *plan_prefill(contexts, targets, MAX_PREFILL_TOKENS)]
        while sum(block.token_ids.size for block in blocks) > MAX_PREFILL_TOKENS:
            self._runner.prefill([blocks.pop(0)])
        return blocks

    def _reorder(self, decoded: int) -> None:
        """Sort the rows into the runner's preferred order, unless rows were added or removed since."""
        order, rows = self._runner.preferred_order, self._scheduler.rows
        if order is None or rows.count != decoded:
            return
        self._kv.permute(order, int(rows.length[:decoded].max()))
        rows.permute(order)
