"""Questions by number: dense numbers from 0, in shuffled epochs, without the questions held out for evaluation.

The question of a number is a function of the configuration and the data only, so a restart continues at any number
without replaying earlier ones. Training and held-out questions never share a text.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from infra.conditions.rows import row_matches
from operators.prompts.config import PromptsConfig, TaskConfig
from operators.prompts.question import BadRow, Question, RowReader, SourceError, UnusableRow, text_key
from operators.prompts.synthetic import SyntheticSource

MAX_BAD_ROWS = 1000
"""Maximum bad rows that are reported one by one; the rest is counted."""

FINITE_TASKS = frozenset({"acre", "gsm_symbolic", "list_functions", "word_ladder"})
"""reasoning-gym's tasks (0.1.25) that do not generate a question for every number."""
FINITE_TASK_SIZE = 500
"""Their number of questions without `size`, the library's default."""

# Positions in the endless sequence of a task. Some tasks need seed + item below 2**32.
_HELDOUT_START = 1 << 30
_RETRY_START = 1 << 31
_MAX_DRAWS = 1000


class PromptSource(Protocol):
    """Training questions by number, and the questions held out from them."""

    total: int | None
    """The number of questions; None: endless."""
    heldout: tuple[Question, ...]
    bad_rows: tuple[BadRow, ...]
    """The first of the rows that are not valid questions."""
    row_count: int
    """Rows that match `where`, and bad ones; 0: questions are generated on demand."""
    trained_rows: int
    """Rows that are trained once an epoch: not bad, and not held out, here or elsewhere; 0 as `row_count`."""
    refused_rows: Mapping[str, int]
    """The number of bad rows by kind."""

    def __getitem__(self, number: int) -> Question:
        """Question `number`. Raises IndexError at `total` and beyond."""

    def close(self) -> None:
        """Release files."""


def open_source(config: TaskConfig, excluded: Sequence[Question] = ()) -> PromptSource:
    """The questions of `config`. Raises SourceError naming the path or task that cannot be used.

    Files are scanned once and need 16 bytes of memory per row. Bad rows are skipped and reported. The `excluded`
    questions are never drawn, as if they were held out here.
    """
    if config.source == "synthetic":
        return SyntheticSource(config)
    config = _sized(config)
    if config.endless:
        return EndlessSource(config, excluded=excluded)
    heldout = _read_heldout_path(config) if config.heldout_path else ()
    return TableSource(config, open_rows(config), heldout, excluded)


def open_levels(config: TaskConfig, excluded: Sequence[Question] = ()) -> tuple[PromptSource, ...]:
    """The questions of `config` by level, none of which is held out; one level if it has no curriculum.

    Raises SourceError as `open_source`.
    """
    if not config.levels:
        return (open_source(config, excluded),)
    config = _sized(config)
    heldout = heldout_questions(config)
    configs = [config.for_level(level) for level in range(len(config.levels))]
    if config.source == "synthetic":
        return tuple(map(SyntheticSource, configs))
    if config.endless:
        return tuple(EndlessSource(each, heldout, excluded) for each in configs)
    rows = open_rows(config)
    return tuple(TableSource(each, rows, heldout, excluded) for each in configs)


def _sized(config: TaskConfig) -> TaskConfig:
    """`config` with a size if its reasoning-gym task has only so many questions: it is then a table."""
    if not config.endless or config.source != "reasoning_gym" or config.task not in FINITE_TASKS:
        return config
    if config.levels:
        raise SourceError(f"levels: reasoning-gym task {config.task!r} is finite: set size")
    return replace(config, size=FINITE_TASK_SIZE)


def open_tasks(config: PromptsConfig) -> tuple[tuple[PromptSource, ...], ...]:
    """The questions of each task of `config` by level. None of them is held out by any task.

    Raises SourceError as `open_source`.
    """
    tasks = config.mixture
    if len(tasks) == 1:
        return (open_levels(tasks[0]),)
    excluded = [question for task in tasks for question in heldout_questions(task)]
    return tuple(open_levels(task, excluded) for task in tasks)


def heldout_questions(config: TaskConfig) -> tuple[Question, ...]:
    """The questions that `open_source(config)` holds out. Raises SourceError."""
    if not config.has_heldout:
        return ()
    source = open_source(config)
    try:
        return source.heldout
    finally:
        source.close()


def all_heldout_questions(config: PromptsConfig) -> Iterator[tuple[TaskConfig, Question]]:
    """The held-out questions of all tasks, interleaved so that every prefix has the share of each task."""
    positioned = []
    for number, task in enumerate(config.mixture):
        questions = heldout_questions(task)
        positioned += [((place + 0.5) / len(questions), number, question) for place, question in enumerate(questions)]
    for _, number, question in sorted(positioned, key=lambda each: each[:2]):
        yield config.mixture[number], question


def open_rows(config: TaskConfig) -> RowReader:
    """The table behind `config`. Raises SourceError."""
    if config.source == "reasoning_gym":
        from operators.prompts.reasoning_gym_rows import ReasoningGymRows

        return ReasoningGymRows(config, config.seed, config.size)
    path = Path(config.path).expanduser()
    if config.source == "jsonl":
        from operators.prompts.jsonl_rows import JsonlRows

        return JsonlRows(path, config)
    from operators.prompts.arrow_rows import open_dataset, open_parquet

    return open_parquet(path, config) if config.source == "parquet" else open_dataset(path, config)


def _read_heldout_path(config: TaskConfig) -> tuple[Question, ...]:
    # Their rewards are those of the questions that they are held out of.
    rows = open_rows(replace(config, path=config.heldout_path, task=config.row_task, levels=()))
    bad: list[BadRow] = []

    def questions() -> Iterator[Question]:
        for row in rows.scan():
            if isinstance(row, BadRow):
                bad.append(row)
            elif row_matches(row.reference, config.where):
                yield row

    try:
        found = tuple(itertools.islice(questions(), config.heldout or None))
    finally:
        rows.close()
    if len(found) < max(1, config.heldout):
        wanted = f", fewer than heldout = {config.heldout}" if config.heldout else ""
        where = f" where {config.where}" if config.where else ""
        raise SourceError(
            f"heldout_path: {rows.name} has {len(found)} usable rows{where}{wanted}{_first(bad)}",
            bad[0].reason if bad and not found else "",
        )
    return found


def _first(bad: Sequence[BadRow]) -> str:
    return f"; line {bad[0].line}: {bad[0].reason}" if bad else ""


class TableSource:
    """The questions of a finite table that match `config.where`.

    The held-out questions are `heldout`, or the `config.heldout` texts with the smallest hashes. `excluded` questions
    are not trained either. Several sources may share `rows`.
    """

    def __init__(
        self, config: TaskConfig, rows: RowReader, heldout: Sequence[Question] = (), excluded: Sequence[Question] = ()
    ) -> None:
        self._config, self._rows = config, rows
        self.bad_rows: tuple[BadRow, ...] = ()
        self.refused_rows: Mapping[str, int] = {}
        self.row_count = 0
        try:
            numbers, keys = self._scan()
            excluded_keys = {text_key(question.text) for question in heldout}
            self.heldout = tuple(heldout) or self._draw_heldout(numbers, keys, excluded_keys)
            excluded_keys.update(text_key(question.text) for question in excluded)
            self._order = array("q", (n for n, key in zip(numbers, keys, strict=True) if key not in excluded_keys))
            if not self._order:
                raise SourceError(f"{rows.name} has no question left for training: all are held out")
        except BaseException:
            rows.close()
            raise
        self.trained_rows = len(self._order)
        self.total = None if config.epochs is None else config.epochs * self.trained_rows
        self._shuffled = (-1, Permutation(1, 0, 0))

    def __getitem__(self, number: int) -> Question:
        """Question `number`, found in constant time. Raises IndexError beyond the last epoch."""
        if number < 0 or (self.total is not None and number >= self.total):
            raise IndexError(f"{self._rows.name} has {self.total} questions, so none of number {number}")
        epoch, position = divmod(number, len(self._order))
        if self._config.shuffle:
            if self._shuffled[0] != epoch:
                self._shuffled = (epoch, Permutation(len(self._order), self._config.seed, epoch))
            position = self._shuffled[1][position]
        return self._rows.question(self._order[position])

    def close(self) -> None:
        """Release files."""
        self._rows.close()

    def _scan(self) -> tuple[array[int], array[int]]:
        """Row numbers and text keys of all questions."""
        bad: list[BadRow] = []
        refused = Counter[str]()
        numbers, keys = array("q"), array("Q")
        for found in self._rows.scan():
            if isinstance(found, Question):
                if row_matches(found.reference, self._config.where):
                    numbers.append(found.index)
                    keys.append(text_key(found.text))
                continue
            refused[found.kind] += 1
            if len(bad) < MAX_BAD_ROWS:
                bad.append(found)
        self.bad_rows, self.refused_rows = tuple(bad), refused
        self.row_count = len(numbers) + refused.total()
        if not numbers:
            where = f" where {self._config.where}" if self._config.where else ""
            total = refused.total()
            what = f" ({total} bad row{'s' * (total > 1)}{_first(bad)})" if total else "" if where else ": it is empty"
            raise SourceError(f"{self._rows.name} has no usable row{where}{what}", bad[0].reason if bad else "")
        return numbers, keys

    def _draw_heldout(self, numbers: array[int], keys: array[int], excluded_keys: set[int]) -> tuple[Question, ...]:
        wanted = self._config.heldout
        if not wanted:
            return ()
        distinct = set(keys)
        if len(distinct) <= wanted:
            name = self._rows.name
            raise SourceError(
                f"heldout = {wanted} leaves none of the {len(distinct)} distinct questions in {name}. Questions with "
                "the same text are one, whatever their answers: make the texts differ, or lower heldout"
            )
        excluded_keys.update(heapq.nsmallest(wanted, distinct))
        first_rows: dict[int, int] = {}
        for number, key in zip(numbers, keys, strict=True):
            if key in excluded_keys:
                first_rows.setdefault(key, number)
        return tuple(self._rows.question(number) for number in sorted(first_rows.values()))


class EndlessSource:
    """A new question for every number, from a task that generates any number of them.

    Item i under reasoning-gym's seed s is Random(s + i), so similar seeds give nearly the same questions. The seed is
    therefore hashed to the start of the sequence. A number whose question is held out draws another far along it.
    """

    total: int | None = None
    bad_rows: tuple[BadRow, ...] = ()
    row_count = trained_rows = 0
    refused_rows: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self, config: TaskConfig, heldout: tuple[Question, ...] | None = None, excluded: Sequence[Question] = ()
    ) -> None:
        """`heldout` replace held-out questions of its own; `excluded` are not trained in addition."""
        from operators.prompts.reasoning_gym_rows import ReasoningGymRows

        self._rows = ReasoningGymRows(config, seed=0, size=None)
        self._seed = config.seed
        self._start = _hash(f"start/{config.seed}") % (1 << 29)
        self.heldout: tuple[Question, ...] = heldout or ()
        self._excluded_keys = {text_key(question.text) for question in self.heldout}
        try:
            self._rows.question(_HELDOUT_START)
        except UnusableRow as error:
            raise SourceError(f"{error}: set size, since the task does not generate questions without end") from error
        if config.heldout and heldout is None:
            self._draw_heldout(config.heldout)
        self._excluded_keys.update(text_key(question.text) for question in excluded)
        _ = self[0]  # fail now if the held-out set leaves no question

    def __getitem__(self, number: int) -> Question:
        """Question `number`. Raises IndexError for a negative one, SourceError if every draw is held out."""
        if number < 0:
            raise IndexError(number)
        item = self._start + number
        for draw in range(_MAX_DRAWS):
            question = self._draw(item)
            if question is not None:
                return question
            item = _RETRY_START + _hash(f"{self._seed}/{number}/{draw}") % (1 << 30)
        raise SourceError(
            f"{self._rows.name}: {_MAX_DRAWS} draws were all among the {len(self._excluded_keys)} held out"
        )

    def close(self) -> None:
        """Nothing to do."""

    def _draw(self, item: int) -> Question | None:
        """Item `item`; None if its text is held out or the task cannot generate it."""
        try:
            question = self._rows.question(item)
        except UnusableRow:
            return None
        return None if text_key(question.text) in self._excluded_keys else question

    def _draw_heldout(self, wanted: int) -> None:
        found: list[Question] = []
        for item in range(20 * wanted + _MAX_DRAWS):
            question = self._draw(_HELDOUT_START + item)
            if question is not None:
                self._excluded_keys.add(text_key(question.text))
                found.append(question)
                if len(found) == wanted:
                    self.heldout = tuple(found)
                    return
        raise SourceError(f"heldout = {wanted}, but {self._rows.name} generated only {len(found)} distinct questions")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


_ROUNDS = 4


class Permutation:
    """A pseudorandom permutation of range(size), a function of (size, seed, epoch) only.

    A Feistel network over the next even power of two, applied until the value is in the range (cycle walking): at most
    four steps on average (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self._size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._key = b"%d/%d" % (seed, epoch)

    def __getitem__(self, position: int) -> int:
        """The element at `position`. Raises IndexError outside the range."""
        if not 0 <= position < self._size:
            raise IndexError(position)
        value = self._encrypt(position)
        while value >= self._size:
            value = self._encrypt(value)
        return value

    def _encrypt(self, value: int) -> int:
        mask = (1 << self._half_bits) - 1
        left, right = value >> self._half_bits, value & mask
        for number in range(_ROUNDS):
            digest = hashlib.blake2b(b"%d/%d" % (number, right), digest_size=8, key=self._key).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        return left << self._half_bits | right
