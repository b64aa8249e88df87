"""DrawPrompts: a bounded lead, dense numbers despite unusable questions, an end, and restarts without repeats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from in_memory_log import Log, Shard
from record_factories import shard, topic_input
from test_prompt_rendering import StoppingTokenizer

from infra.kafka.note import Note
from infra.kafka.role_notes import NotesUnavailable
from operators.io.elements import Output, PartitionKey, Restored, ShardFold
from operators.placement.config import PlacementConfig
from operators.prompts.config import PromptsConfig
from operators.prompts.draw_prompts import POLL_EVERY_S, DrawPrompts, PromptFold, _Task
from operators.prompts.question import BadRow, Question, UnusableRow
from schemas.records import DeadLetter, LevelReply, LevelRequest, Metric, Prompt
from schemas.topics import CURRICULUM, DEAD_LETTERS, LEVEL_REQUEST, METRICS, PROMPTS


@dataclass
class Questions:
    """Questions with texts of the given `lengths`; -1 is an unusable row."""

    lengths: list[int]
    total: int | None = None
    bad_rows: tuple[BadRow, ...] = ()
    row_count: int = 0
    trained_rows: int = 0
    refused_rows: Mapping[str, int] = field(default_factory=dict)
    heldout: tuple[Question, ...] = ()
    closed: bool = False

    def __getitem__(self, number: int) -> Question:
        length = self.lengths[number % len(self.lengths)]
        if length < 0:
            raise UnusableRow(f"row {number} is no question")
        return Question(number, f"{number:06}"[-6:].ljust(length, "x")[:length], (), {"answer": str(number)}, "made up")

    def close(self) -> None:
        self.closed = True


class CharacterTokenizer:
    """A tokenizer with one token per character."""

    eos_token_id = 0
    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]


@dataclass
class Backlog:
    count: int | None = 0
    closed: bool = False

    def records(self) -> int | None:
        return self.count

    def close(self) -> None:
        self.closed = True


@dataclass
class Prompts:
    """The prompts operator on a log in memory. `backlog.count` is the number of prompts placement has not read."""

    questions: Questions
    lead: int = 3
    slack: int = 0
    log: Log = field(default_factory=Log)
    backlog: Backlog = field(default_factory=Backlog)
    now: float = 0.0
    harder: tuple[Questions, ...] = ()
    plain_agents: bool = False
    tokenizer: Any = field(default_factory=CharacterTokenizer)
    environment: str = ""
    requested: int | bool | None = None
    """The level of the buffer's open request."""
    readable: bool = True
    """Whether the buffer's note can be read."""

    def __post_init__(self) -> None:
        config = shard("prompts", topic_input(CURRICULUM, keys=(LEVEL_REQUEST,)))
        prompts = PromptsConfig(task="chain_sum", max_new_tokens=8, environment=self.environment)
        self._step = DrawPrompts(prompts, config, Path(), 16, self.lead, self.slack, self.plain_agents)
        self.shard = Shard(self.log, config, self._restore)
        self.shard.start()

    def _restore(self, restored: Restored) -> ShardFold:
        backlog: Any = self.backlog
        task = _Task(self._step.config, [self.questions, *self.harder], self.tokenizer)
        return PromptFold(self._step, [task], backlog, restored.state, lambda: self.now, notes=self._notes)

    def _notes(self, role: str) -> dict[int, Note]:
        if not self.readable:
            raise NotesUnavailable("no broker")
        return {0: Note(state={"curriculum": {"": [0, 0, self.requested, {}]}})} if role == "experience" else {}

    def outputs(self) -> list[Output]:
        """The outputs of the next poll of the backlog."""
        self.now += POLL_EVERY_S
        return list(self.shard.run())

    def look(self) -> list[str]:
        """The ids of the prompts drawn at the next poll of the backlog."""
        return [output.key for output in self.outputs() if isinstance(output.record, Prompt)]


@pytest.mark.parametrize(("plain", "expected"), [(True, (2, 7)), (False, (2, 7, ord("|")))])
def test_prompts_of_agents_stop_where_the_gateway_ends_turns(plain: bool, expected: tuple[int, ...]) -> None:
    drawn = Prompts(Questions([6]), plain_agents=plain, tokenizer=StoppingTokenizer(), environment="agent")
    (prompt, *_) = [output.record for output in drawn.outputs() if isinstance(output.record, Prompt)]
    assert prompt.sampling.stop_token_ids == expected


def test_draw_prompts_keeps_the_lead() -> None:
    prompts = Prompts(Questions([6]))
    assert prompts.look() == ["p0", "p1", "p2"]
    prompts.backlog.count = 2
    assert prompts.look() == ["p3"]
    prompts.backlog.count = 9
    assert prompts.look() == []


def test_draw_prompts_waits_until_more_than_the_slack_is_missing() -> None:
    """Then it fills the lead in one transaction; also after a restart, and up to the last question."""
    prompts = Prompts(Questions([6], total=12), lead=8, slack=2)
    assert len(prompts.look()) == 8
    for count, drawn in ((7, 0), (6, 0), (5, 3), (8, 0)):
        prompts.backlog.count = count
        assert len(prompts.look()) == drawn
    prompts.shard.start()
    prompts.backlog.count = 6
    assert prompts.look() == []
    prompts.backlog.count = 0
    assert prompts.look() == ["p11"]


def test_slack_is_a_quarter_of_the_default_lead() -> None:
    """A new level begins behind the prompts that are drawn, and a lead that somebody has chosen is kept."""
    default = PlacementConfig()
    assert (default.lead(128, 8, levels=False), default.lead_slack(256, levels=False)) == (256, 64)
    assert default.lead_slack(64, levels=True) == 0
    assert PlacementConfig(prompt_lead=256).lead_slack(256, levels=False) == 0


def test_draw_prompts_draws_nothing_while_the_backlog_is_unknown() -> None:
    prompts = Prompts(Questions([6]))
    prompts.backlog.count = None
    assert prompts.look() == []
    prompts.backlog.count = 1
    assert prompts.look() == ["p0", "p1"]


def test_draw_prompts_polls_the_backlog_periodically() -> None:
    prompts = Prompts(Questions([6]))
    assert len(prompts.look()) == 3
    assert prompts.shard.run() == []
    prompts.now += POLL_EVERY_S
    assert len([output for output in prompts.shard.run() if output.topic is PROMPTS]) == 3


def test_unusable_questions_become_dead_letters_without_a_gap() -> None:
    prompts = Prompts(Questions([6, 16, -1, 15]), lead=4)
    assert prompts.look() == ["p0", "p1"]
    made: list[Prompt] = prompts.log.rows(PROMPTS)
    assert [(p.number, len(p.token_ids), p.sampling.max_new_tokens, p.samples) for p in made] == [
        (0, 6, 8, 8),
        (1, 15, 1, 8),
    ]
    letters: list[DeadLetter] = prompts.log.rows(DEAD_LETTERS)
    assert [(letter.topic, letter.offset, letter.payload) for letter in letters] == [
        ("chain_sum", 1, b"000001xxxxxxxxxx"),
        ("chain_sum", 2, b""),
    ]
    assert "no room for an answer" in letters[0].reason
    assert letters[1].reason == "row 2 is no question"


def test_metric_counts_prompts_and_refused_rows_across_restarts() -> None:
    prompts = Prompts(Questions([6, 16, -1, 15], row_count=9, refused_rows={"no answer": 3}), lead=4)
    prompts.look()
    prompts.shard.commit()
    prompts.shard.start()
    prompts.look()
    metrics: list[Metric] = prompts.log.rows(METRICS)
    refused = {"refused/no answer": 3, "refused/too long": 1, "refused/malformed": 1}
    task = {
        'drawn{task="chain_sum"}': 4,
        'refused_share{task="chain_sum"}': (3 + 2 / 4 * 6) / 9,
    }  # six rows passed the scan
    assert (metrics[0].name, metrics[0].values) == ("prompts", {"prompts": 2, "rows": 9, **refused, **task})
    refused |= {"refused/too long": 2, "refused/malformed": 2}
    task['drawn{task="chain_sum"}'] = 8
    assert metrics[-1].values == {"prompts": 4, "rows": 9, **refused, **task}


def test_bad_rows_are_reported_once() -> None:
    prompts = Prompts(Questions([6], bad_rows=(BadRow(7, "not JSON"),)))
    prompts.backlog.count = 3
    assert [prompts.look(), prompts.look()] == [[], []]
    prompts.backlog.count = 0
    prompts.look()
    prompts.shard.start()
    prompts.look()
    letters: list[DeadLetter] = prompts.log.rows(DEAD_LETTERS)
    assert [(letter.offset, letter.reason) for letter in letters] == [(7, "not JSON")]


def test_finite_dataset_ends_with_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    prompts = Prompts(Questions([6], total=5))
    assert [prompts.look(), prompts.look(), prompts.look()] == [["p0", "p1", "p2"], ["p3", "p4"], []]
    (log_record,) = [each for each in caplog.records if each.name == DrawPrompts.__module__]
    assert log_record.message == "all 5 questions are drawn; 5 of them became prompts"
    assert prompts.look() == []
    metrics: list[Metric] = prompts.log.rows(METRICS)
    assert [metric.values.get("exhausted") for metric in metrics] == [None, 1.0]


@pytest.mark.parametrize("committed", [True, False])
def test_restart_continues_after_the_last_commit(committed: bool) -> None:
    prompts = Prompts(Questions([6, -1, 6]))
    prompts.look()
    prompts.now += POLL_EVERY_S
    prompts.shard.turn()
    if committed:
        prompts.shard.commit()
    prompts.shard.start()
    assert prompts.backlog.closed
    assert prompts.questions.closed
    assert prompts.look() == (["p4", "p5"] if committed else ["p2", "p3"])
    numbers = [(p.number, p.text[:6]) for p in prompts.log.rows(PROMPTS)]
    assert numbers[:4] == [(0, "000000"), (1, "000002"), (2, "000003"), (3, "000005")]


def ask(prompts: Prompts, level: int) -> None:
    """Request `level` as the buffer does."""
    prompts.requested = level
    prompts.log.append(CURRICULUM, request(level), LEVEL_REQUEST)


def request(level: int, task: str = "") -> LevelRequest:
    return LevelRequest(task, level, 0, 1.0, 8, 0)


def begun(prompts: Prompts) -> list[tuple[int, int]]:
    """The levels of the replies and their first prompts."""
    return [(row.level, row.first_prompt) for row in prompts.log.rows(CURRICULUM) if isinstance(row, LevelReply)]


@pytest.mark.parametrize("committed", [True, False])
def test_level_begins_at_its_request_and_is_recorded(committed: bool) -> None:
    prompts = Prompts(Questions([6]), harder=(Questions([7]), Questions([8])))
    prompts.look()
    ask(prompts, 1)
    prompts.now += POLL_EVERY_S
    prompts.shard.turn()
    if committed:
        prompts.shard.commit()
    prompts.shard.start()
    prompts.look()
    ask(prompts, 9)  # there are only three levels
    prompts.shard.run()
    prompts.shard.start()
    prompts.look()
    assert begun(prompts) == [(1, 3), (2, 9 if committed else 6)]
    for made in prompts.log.rows(PROMPTS):
        level = sum(made.number >= number for _, number in begun(prompts))
        assert len(made.text) == 6 + level


def test_level_resumes_where_it_was_left_across_restarts() -> None:
    prompts = Prompts(Questions([6]), harder=(Questions([7]),))
    for level in (1, 0, 1):
        prompts.look()
        ask(prompts, level)
        prompts.shard.run()
        prompts.shard.start()
    prompts.look()
    made = [made.text for made in prompts.log.rows(PROMPTS)]
    for length in (6, 7):
        drawn = [int(text[:6]) for text in made if len(text) == length]
        assert drawn == list(range(6))


def test_requests_of_another_program_change_no_level() -> None:
    prompts = Prompts(Questions([6]), harder=(Questions([7]), Questions([8])))
    prompts.look()
    for foreign in (request(1), LevelReply("", 1, 0, 0)):  # the buffer has none open
        prompts.log.append(CURRICULUM, foreign, LEVEL_REQUEST)
    prompts.look()
    ask(prompts, 1)
    for foreign in (request(2), request(1, "chain_sum"), request(1)):  # the last one repeats the buffer's
        prompts.log.append(CURRICULUM, foreign, LEVEL_REQUEST)
    prompts.look()
    prompts.requested = None  # the buffer has read the reply
    prompts.shard.start()
    prompts.log.append(CURRICULUM, request(0), LEVEL_REQUEST)
    prompts.look()
    assert begun(prompts)[1:] == [(1, 6), (1, 6)]  # after the foreign one
    assert [len(made.text) for made in prompts.log.rows(PROMPTS)] == [6] * 6 + [7] * 6
    letters: list[DeadLetter] = prompts.log.rows(DEAD_LETTERS)
    assert [(letter.step, letter.topic, letter.offset) for letter in letters] == [
        ("change levels", "curriculum", offset) for offset in (0, 1, 3, 4, 9)
    ]
    assert letters[2].reason == ("the buffer has no open request for level 2 of task '': it is of another program")


def test_request_waits_while_the_buffers_note_is_unreadable() -> None:
    prompts = Prompts(Questions([6]), harder=(Questions([7]),), readable=False)
    ask(prompts, 1)
    assert prompts.look() == ["p0", "p1", "p2"]
    prompts.shard.start()
    prompts.look()
    assert prompts.log.committed(prompts.shard.config.group).offsets[PartitionKey("curriculum", 0)] == 0
    prompts.readable = True
    prompts.look()
    assert begun(prompts) == [(1, 6)]
    assert prompts.log.committed(prompts.shard.config.group).offsets[PartitionKey("curriculum", 0)] == 1


def test_levels_continue_from_notes_of_release_0_2_0() -> None:
    """They had no level of an open request, and not the first prompt of a level."""
    prompts = Prompts(Questions([6]), harder=(Questions([7]),))
    prompts.look()
    group = prompts.log.committed(prompts.shard.config.group)
    group.state = {name: value for name, value in group.state.items() if name != "levels"}
    prompts.shard.start()
    prompts.look()
    assert group.state["levels"] == {"": [(0, None)]}
    prompts.requested = True
    prompts.log.append(CURRICULUM, request(1), LEVEL_REQUEST)
    prompts.look()
    assert begun(prompts) == [(1, 6)]
    assert group.state["levels"] == {"": [(0, None), (1, 6)]}
