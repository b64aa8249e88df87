"""DrawPrompts: questions become prompts, a bounded lead ahead of placement."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.kafka.backlog import Backlog
from operators.io.config import ShardConfig
from operators.io.elements import Checkpoint, Output, Place, Polled, Restored
from operators.prompts.config import PromptsConfig
from operators.prompts.question import UnusableRow
from operators.prompts.rendering import Tokenizer, render
from operators.prompts.sources import Source, open_levels
from operators.prompts.synthetic import SyntheticTokenizer
from schemas.records import DeadLetter, LevelAsked, LevelBegun
from schemas.topics import BEGUN, CURRICULUM, DEAD_LETTERS, PROMPTS, group_name

LOOK_EVERY_S = 0.5
"""How often placement's progress is looked up."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DrawPrompts:
    """Writes prompts in the order of the source, at most `lead` prompts ahead of what placement has dispatched.

    `model` is the folder of the tokenizer, None for synthetic prompts; `context` the room of its model in tokens.
    """

    config: PromptsConfig
    shard: ShardConfig
    model: Path | None
    context: int
    lead: int

    def restore(self, restored: Restored) -> _Drawing:
        backlog = Backlog(self.shard.client, group_name(self.shard.run, "placement"), PROMPTS.name(self.shard.run))
        return _Drawing(self, open_levels(self.config), self._tokenizer(), backlog, restored.marks)

    def _tokenizer(self) -> Tokenizer:
        if self.model is None:
            return SyntheticTokenizer(self.config.prompt_tokens)
        from infra.models.checkpoint_folder import load_tokenizer  # here: it imports torch

        return load_tokenizer(self.model)


class _Drawing:
    """`cursors` count questions taken from each source, `number` prompts made of them: unusable ones leave no gap.

    `sources` are by level. A level begins where it is asked for, whatever was drawn by then, and goes on where it was
    left: which prompt is of which level stands in the curriculum topic, so the log tells what every prompt was made of.
    """

    def __init__(
        self,
        step: DrawPrompts,
        sources: Sequence[Source],
        tokenizer: Tokenizer,
        backlog: Backlog,
        marks: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._step, self._sources, self._tokenizer, self._backlog = step, sources, tokenizer, backlog
        self._cursors: list[int] = list(marks.get("cursors", [0] * len(sources)))
        self._number = marks.get("number", 0)
        self._level = marks.get("level", 0)
        self._clock, self._sleep = clock, sleep
        self._bad_rows = () if any(self._cursors) else self._source.bad_rows  # of the table, which all levels share
        self._exhausted = False
        self._look_at = clock()

    @property
    def _source(self) -> Source:
        return self._sources[self._level]

    def fold(self, polled: Polled) -> list[Output]:
        begun = [output for received in polled.records for output in self._begin(received.record)]
        return begun + self._draw_ahead()

    def _begin(self, asked: LevelAsked) -> list[Output]:
        """Go on with questions of another level."""
        self._level = min(max(asked.level, 0), len(self._sources) - 1)
        return [Output(CURRICULUM, BEGUN, LevelBegun(self._level, self._number, time.time_ns() // 10**6))]

    def _draw_ahead(self) -> list[Output]:
        now = self._clock()
        if self._exhausted or now < self._look_at:
            self._sleep(LOOK_EVERY_S if self._exhausted else self._look_at - now)  # nothing else paces this source
            return []
        self._look_at = now + LOOK_EVERY_S
        bad_rows, self._bad_rows = self._bad_rows, ()
        outputs = [self._letter(row.reason, row.line, b"") for row in bad_rows]
        for _ in range(self._step.lead - self._backlog.records()):
            outputs += self._draw()
        return outputs

    def checkpoint(self, positions: Mapping[Place, int]) -> Checkpoint:
        return Checkpoint(positions, marks={"cursors": self._cursors[:], "number": self._number, "level": self._level})

    def busy(self) -> bool:
        return False

    def close(self) -> None:
        for source in self._sources:
            source.close()
        self._backlog.close()

    def _draw(self) -> list[Output]:
        step, cursor = self._step, self._cursors[self._level]
        if self._source.total is not None and cursor >= self._source.total:
            if not self._exhausted:
                log.warning("the questions have come to an end: %d prompts were made of %d", self._number, cursor)
            self._exhausted = True
            return []
        self._cursors[self._level] += 1
        try:
            question = self._source[cursor]
        except UnusableRow as error:
            return [self._letter(str(error), cursor, b"")]
        try:
            prompt = render(question, self._number, step.config, self._tokenizer, step.context)
        except ValueError as error:
            return [self._letter(str(error), cursor, question.text.encode())]
        self._number += 1
        return [Output(PROMPTS, prompt.prompt_id, prompt)]

    def _letter(self, reason: str, number: int, payload: bytes) -> Output:
        origin = self._step.config.path or self._step.config.task
        letter = DeadLetter("draw prompts", reason, origin, 0, number, payload, time.time_ns() // 10**6)
        return Output(DEAD_LETTERS, "", letter)
