"""DrawPrompts: draws questions and writes prompts, a bounded number ahead of placement."""

from __future__ import annotations

import bisect
import hashlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from infra.clocks import wall_ms
from infra.kafka.lag import Backlog
from infra.kafka.note import uncommitted_consumer
from infra.kafka.role_notes import NO_NOTES, ReadNotes, notes_reader
from infra.runners.step_metrics import StepCounters, phase
from operators.io.awaiting_notes import AwaitingNotes
from operators.io.config import ShardConfig
from operators.io.dead_letters import dead_letter
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, ReceivedRecord, Restored, ShardFold
from operators.io.pending import PendingOffsets
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

LEVELS_RECORDED = 8
"""Of so many levels of a task the commit note has the first prompt: a shard of the buffer may be late by some."""

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
        notes: ReadNotes | None = None,
    ) -> PromptFold:
        run, client = self.shard.run, self.shard.client
        if backlog is None:
            backlog = Backlog(client, group_name(run, "placement"), PROMPTS.name(run))
        if notes is None:
            notes = notes_reader(run, lambda: uncommitted_consumer(client), undecided=True)
        return PromptFold(self, self._tasks(), backlog, restored.state, clock, now, notes)

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
    begun: deque[tuple[int, int | None]] = field(init=False)
    """The last levels, each with the number of its first prompt: the buffer validates replies by it. None: begun under
    release 0.2.0, which did not record the number."""

    def __post_init__(self) -> None:
        self.cursors = [0] * len(self.sources)
        self.begun = deque([(0, 0)], LEVELS_RECORDED)

    def begin(self, level: int, number: int) -> int:
        """Change to `level` from prompt `number` on; returns the first prompt of it, also if it has begun before."""
        last, first = self.begun[-1]
        if level == last and first is not None:
            return first
        self.level = level
        self.begun.append((level, number))
        return number

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
    records the first prompt of each level, so the log determines the question of every prompt. Requests that the buffer
    has not committed as open are of another program.
    """

    def __init__(
        self,
        step: DrawPrompts,
        tasks: Sequence[_Task],
        backlog: Backlog,
        state: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], int] = wall_ms,
        notes: ReadNotes = NO_NOTES,
    ) -> None:
        self._now = now
        self._pending = PendingOffsets()
        self._requests = AwaitingNotes(notes, "experience", self._pending)
        self._step, self._tasks, self._backlog = step, tasks, backlog
        self._number = state.get("number", 0)
        for task, (cursors, level, *refused) in zip(tasks, state.get("tasks", ()), strict=False):
            task.cursors, task.level, task.refused = list(cursors), level, sum(refused)  # 0.2.0 counted by kind only
            begun = state.get("levels", {}).get(self._curriculum_of(task), [(level, None)])
            task.begun = deque(map(tuple, begun), LEVELS_RECORDED)
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
            requests, buffer = self._requests.take(polled.records)
            replies = [self._begin_level(received, buffer) for received in requests]
        return replies + self._draw_ahead()

    def _begin_level(self, received: ReceivedRecord, buffer: Mapping[str, Any]) -> Output:
        """Change to the requested level, if `buffer`, the state in the buffer's last note, has the request as open."""
        request: LevelRequest | LevelReply = received.record
        task = next((each for each in self._tasks if self._curriculum_of(each) == request.task), None)
        if task is None or not isinstance(request, LevelRequest) or not is_open(request, buffer):
            reason = f"the buffer has no open request for level {request.level} of task {request.task[:80]!r}"
            return dead_letter(received, "change levels", f"{reason}: it is of another program", self._now())
        first = task.begin(min(request.level, len(task.sources) - 1), self._number)
        return Output(CURRICULUM, LEVEL_REPLY, LevelReply(request.task, task.level, first, self._now()))

    def _curriculum_of(self, task: _Task) -> str:
        """The name of the task's curriculum, see `PromptsConfig.curricula`."""
        return task.config.task_name if self._step.config.tasks else ""

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
        levels = {self._curriculum_of(task): list(task.begun) for task in self._tasks if len(task.sources) > 1}
        state = {"number": self._number, "tasks": tasks, "refused": refused, **({"levels": levels} if levels else {})}
        return Checkpoint(self._pending.low_water(positions), state=state)

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


def is_open(request: LevelRequest, buffer: Mapping[str, Any]) -> bool:
    """Whether `buffer`, the state in the last commit note of the buffer's first shard, has `request` as open.

    Release 0.2.0 recorded only that one is open: True.
    """
    _, _, wanted, _ = buffer.get("curriculum", {}).get(request.task, (0, 0, None, {}))
    return wanted is True or (wanted is not False and wanted == request.level)


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
