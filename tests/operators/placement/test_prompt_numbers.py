"""Numbers of prompts that do not follow the last one: of another program, or after a hole in the log."""

from __future__ import annotations

import logging

import pytest
from placement_harness import Placement, dead_letters, names

from infra.kafka.note import Note
from infra.kafka.role_notes import NotesUnavailable
from operators.placement.prompt_numbers import PromptNumbers


def with_drawn(number: int, **config: int) -> Placement:
    """Placement whose prompts have committed the next number `number`."""
    placement = Placement(**config)
    placement.notes = lambda role: {0: Note(state={"number": number, "evaluated": [number, None, None, 0]})}
    placement.restart()
    placement.beat(0, placement.publish(0), capacity=64)
    return placement


def test_prompt_of_another_program_is_a_dead_letter() -> None:
    placement = with_drawn(1)
    placement.prompts(0, 5000, samples=1)
    placement.questions(7000, under=placement.publish(0))
    outputs = placement.run()
    assert names(outputs) == ["p0.0"]
    assert sorted(dead_letters(outputs)) == [
        "prompt number 5000 is of another program: the next of prompts is 1",
        "prompt number 7000 is of another program: the next of evaluation is 1",
    ]
    placement.restart()
    placement.notes = lambda role: {0: Note(state={"number": 3})}
    placement.prompts(1, 2, samples=1)
    placement.beat(0, placement.publish(0), incarnation=2, capacity=64)
    assert names(placement.run()) == ["p0.0", "p1.0", "p2.0"]


def test_repeated_prompt_is_a_dead_letter() -> None:
    """The further samples that it asks for would never be scored, nor admit others."""
    placement = with_drawn(2)
    placement.prompts(0, 1, samples=1)
    assert names(placement.run()) == ["p0.0", "p1.0"]
    placement.prompts(0, samples=8)
    outputs = placement.run()
    assert names(outputs) == []
    assert dead_letters(outputs) == ["prompt number 0 comes after number 1: it is of another program"]
    placement.restart()  # reads again what has not begun, and the repeated one, in order
    placement.beat(0, placement.publish(1), incarnation=2, capacity=64)
    assert names(placement.run()) == ["p0.0", "p1.0"]


def test_hole_in_prompt_numbers_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    placement = with_drawn(6)
    placement.prompts(0, 3, 4, 5, samples=1)
    with caplog.at_level(logging.ERROR):
        assert names(placement.run()) == ["p0.0", "p3.0", "p4.0", "p5.0"]
        placement.restart()
        placement.run()
    (line,) = [each.getMessage() for each in caplog.records if each.name.startswith("operators.placement.")]
    assert line.startswith("the log lacks prompts p1 to p2: it continues with p3, ")


def test_prompt_numbers_read_notes_once_a_poll_if_needed() -> None:
    calls: list[str] = []

    def notes(role: str) -> dict[int, Note]:
        calls.append(role)
        if len(calls) > 1:
            raise NotesUnavailable("no broker")
        return {0: Note(state={"number": 2})}

    numbers = PromptNumbers({}, notes)
    assert [numbers.invalid_reason("train", number) for number in (0, 1)] == [None] * 2
    assert calls == []
    assert all(numbers.invalid_reason("train", number) for number in (3, 4, 99_999))
    assert calls == ["prompts"]
    numbers.begin_poll()
    assert numbers.invalid_reason("train", 4) is None  # not known to be of another program
    assert PromptNumbers(None).invalid_reason("train", 70_000) is None
