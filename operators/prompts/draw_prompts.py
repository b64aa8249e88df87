"""DrawPrompts: draws questions and writes prompts, a bounded number ahead of placement."""

from __future__ import annotations

import bisect
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from infra.clocks import wall_ms
from infra.kafka.lag import Backlog
from infra.runners.step_metrics import StepCounters, phase
from operators.io.config import ShardConfig
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, Restored, ShardFold
from operators.prompts.config import PromptsConfig, TaskConfig
from operators.prompts.question import UnusableRow
from operators.prompts.refused_rows import estimate_refused, refusal_kind
from operators.prompts.rendering import Tokenizer, render
from operators.prompts.sources import PromptSource, open_tasks
from operators.prompts.synthetic import SyntheticTokenizer
from schemas.metric_labels import EXHAUSTED, REFUSED, labelled
from schemas.records import DRAW_PROMPTS, DeadLetter, LevelReply, LevelRequest, Metric
from schemas.topics import CURRICULUM, DEAD_LETTERS, LEVEL_REPLY, METRICS, PROMPTS, group_name

POLL_EVERY_S = 0.5
"""Period of reading how far placement has read the prompts."""
MOST_AT_ONCE = 1024
"""Prompts of one transaction, at most."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DrawPrompts:
    """Writes prompts in the order of their sources, at most `lead` prompts ahead of placement's dispatch.

    It draws once more than `slack` of them are missing. `model` is the folder of the tokenizer, None for synthetic
    prompts; `context` the context length of the model in tokens. `plain_agents`: see `render`.
    """

    config: PromptsConfig
    shard: ShardConfig
    model: Path | None
    context: int
    lead: int
    slack: int = 0
    plain_agents: bool = False

    def restore(
        self,
        restored: Restored,
        backlog: Backlog | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], int] = wall_ms,
    ) -> PromptFold:
        if backlog is None:
            backlog = Backlog(self.shard.client, group_name(self.shard.run, "placement"), PROMPTS.name(self.shard.run))
        return PromptFold(self, self._tasks(), backlog, restored.state, clock, now)

    def _tasks(self) -> list[_Task]:
        tasks, sources = self.config.mixture, open_tasks(self.config)
        if self.model is None:
            return [
                _Task(task, own, SyntheticTokenizer(task.prompt_tokens))
                for task, own in zip(tasks, sources, strict=True)
            ]
        from infra.models.checkpoint_folder import load_tokenizer  # here: it imports torch

        tokenizer = load_tokenizer(self.model)
        return [_Task(task, own, tokenizer) for task, own in zip(tasks, sources, strict=True)]


@dataclass
class _Task:
    """The position in the questions of a task. `sources` are by level; `cursors` count questions drawn from each."""

    config: TaskConfig
    sources: Sequence[PromptSource]
    tokenizer: Tokenizer
    level: int = 0
    refused: int = 0
    """Questions drawn that became no prompt."""
    cursors: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.cursors = [0] * len(self.sources)

    @property
    def refused_share(self) -> float:
        """The estimated share of refused rows, as in the check before the start."""
        return estimate_refused(self.source, {"": self.refused}, max(1, self.questions_drawn)).share

    @property
    def source(self) -> PromptSource:
        return self.sources[self.level]

    @property
    def cursor(self) -> int:
        return self.cursors[self.level]

    @property
    def questions_drawn(self) -> int:
        return sum(self.cursors)

    @property
    def exhausted(self) -> bool:
        return self.source.total is not None and self.cursor >= self.source.total


class PromptFold(ShardFold):
    """Numbers prompts densely: unusable questions leave no gap.

    A level begins at the next prompt after its request, at the position where it was left before. The curriculum topic
    records the first prompt of each level, so the log determines the question of every prompt.
    """

    def __init__(
        self,
        step: DrawPrompts,
        tasks: Sequence[_Task],
        backlog: Backlog,
        state: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], int] = wall_ms,
    ) -> None:
        self._now = now
        self._step, self._tasks, self._backlog = step, tasks, backlog
        self._number = state.get("number", 0)
        for task, (cursors, level, *refused) in zip(tasks, state.get("tasks", ()), strict=False):
            task.cursors, task.level, task.refused = list(cursors), level, sum(refused)  # 0.2.0 counted by kind only
        self._clock = clock
        fresh = not any(task.questions_drawn for task in tasks)
        # All levels of a table have the same bad rows.
        self._bad_rows = [(task, row) for task in tasks for row in task.source.bad_rows] if fresh else []
        refused = state.get("refused", {})
        self._refused = StepCounters(step.shard.group, {REFUSED + kind: count for kind, count in refused.items()})
        self._published: tuple[int, int, bool] | None = None
        self._exhausted = False
        self._next_poll_at = clock()

    def fold(self, polled: Polled) -> list[Output]:
        with phase("change levels"):
            replies = [output for received in polled.records for output in self._begin_level(received.record)]
        return replies + self._draw_ahead()

    def _begin_level(self, request: LevelRequest) -> list[Output]:
        """Change to the requested level; an unknown task has no effect."""
        replies = []
        for task in self._tasks:
            if request.task in ("", task.config.task_name):
                task.level = min(max(request.level, 0), len(task.sources) - 1)
                replies.append(LevelReply(request.task, task.level, self._number, self._now()))
        return [Output(CURRICULUM, LEVEL_REPLY, each) for each in replies]

    def _draw_ahead(self) -> list[Output]:
        now = self._clock()
        if self._exhausted or now < self._next_poll_at:
            return []
        self._next_poll_at = now + POLL_EVERY_S
        bad_rows, self._bad_rows = self._bad_rows, []
        outputs = [self._dead_letter(task, row.reason, row.line, b"") for task, row in bad_rows]
        if (backlog := self._backlog.records()) is None:
            return outputs
        missing = self._step.lead - backlog
        for _ in range(min(missing, MOST_AT_ONCE) if missing > self._step.slack else 0):
            outputs += self._draw()
        return outputs + self._new_metric()

    def _new_metric(self) -> list[Output]:
        """The metric `prompts`, if its values have changed."""
        counts = self._number, self._refused.totals.total(), self._exhausted
        if counts == self._published:
            return []
        self._published = counts
        refused = Counter(self._refused.totals)
        for task in self._tasks:
            refused.update({REFUSED + kind: count for kind, count in task.source.refused_rows.items()})
        values = {"prompts": float(self._number), "rows": float(sum(task.source.row_count for task in self._tasks))}
        values |= {name: float(count) for name, count in refused.items() if count}
        if self._exhausted:
            values[EXHAUSTED] = 1.0
        for task in self._tasks:
            name = task.config.task_name
            values[labelled("drawn", task=name)] = float(task.questions_drawn)
            values[labelled("refused_share", task=name)] = task.refused_share
        return [Output(METRICS, "prompts", Metric("prompts", self._number, values, self._now()))]

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        tasks = [[task.cursors[:], task.level, task.refused] for task in self._tasks]
        refused = {name.removeprefix(REFUSED): count for name, count in self._refused.totals.items()}
        return Checkpoint(positions, state={"number": self._number, "tasks": tasks, "refused": refused})

    def close(self) -> None:
        for task in self._tasks:
            for source in task.sources:
                source.close()
        self._backlog.close()

    def _draw(self) -> list[Output]:
        step = self._step
        weights = [0.0 if task.exhausted else task.config.weight for task in self._tasks]
        drawn = draw_task(step.config.seed, self._number, weights)
        if drawn is None:
            if not self._exhausted:
                questions_drawn = sum(task.questions_drawn for task in self._tasks)
                log.warning("all %d questions are drawn; %d of them became prompts", questions_drawn, self._number)
            self._exhausted = True
            return []
        task = self._tasks[drawn]
        cursor = task.cursor
        task.cursors[task.level] += 1
        try:
            with phase("draw questions"):
                question = task.source[cursor]
        except UnusableRow as error:
            self._refused.add(REFUSED + error.kind)
            task.refused += 1
            return [self._dead_letter(task, str(error), cursor, b"")]
        try:
            with phase("render prompts"):
                prompt = render(
                    question, self._number, task.config, task.tokenizer, step.context, plain_agents=step.plain_agents
                )
        except ValueError as error:
            self._refused.add(REFUSED + refusal_kind(error))
            task.refused += 1
            return [self._dead_letter(task, str(error), cursor, question.text.encode())]
        self._number += 1
        return [Output(PROMPTS, prompt.prompt_id, prompt)]

    def _dead_letter(self, task: _Task, reason: str, number: int, payload: bytes) -> Output:
        origin = task.config.path or task.config.task
        letter = DeadLetter(DRAW_PROMPTS, reason, origin, 0, number, payload, self._now())
        return Output(DEAD_LETTERS, "", letter)


def draw_task(seed: int, number: int, weights: Sequence[float]) -> int | None:
    """The index of the task of prompt `number`, drawn by its share of `weights`; None if all weights are 0.

    Tasks are drawn, not assigned round-robin: prompts are assigned to partitions round-robin, so each partition could
    have a single task.
    """
    ends = list(accumulate(weights))
    if not ends or not ends[-1]:
        return None
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    at = int.from_bytes(digest, "big") / 2**64 * ends[-1]
    return min(bisect.bisect_right(ends, at), max(index for index, weight in enumerate(weights) if weight))
