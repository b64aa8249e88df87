"""The turns of an agent's episode as a tree, from its history, and as text."""

from __future__ import annotations

import json
from typing import Any

from pipelines.inspect.log.turns import turns_of, turns_to_plain
from pipelines.present.turns import turn_lines
from schemas import records as r
from schemas.columns import flags, floats, token_ids

SAMPLING = r.Sampling(1.0, 1.0, 0, 64, (0,), 0)
PROMPT = r.Prompt(0, "train", "sums", "2 + 3", token_ids([1]), "{}", 1, SAMPLING, environment="agent")
USER, AGAIN = {"role": "user", "content": "2 + 3"}, {"role": "tool", "content": "5"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}],
}
DONE = {"role": "assistant", "content": "it is 5"}
EMPTY = r.Response(token_ids([]), floats([]), flags([]))


def request(name: str, start: int, at: int, messages: list[Any], *context: tuple[int, int]) -> r.TurnRequest:
    ranges = tuple(r.TokenRange(*each) for each in context)
    text = json.dumps(messages)
    return r.TurnRequest(
        *("p0.0", 1, 0, 1, name, name, start, ranges, token_ids([7, 8]), 8, (), text, "[]", False, at),
    )


def ended(name: str, start: int, stop: int, at: int, reason: Any = "stop") -> r.TurnEnded:
    return r.TurnEnded("p0.0", 1, 0, 1, name, start, stop, reason, None, at)


def history(*conversations: list[Any]) -> list[Any]:
    kept = tuple(r.Conversation(n, 2, json.dumps(each)) for n, each in enumerate(conversations))
    return [
        PROMPT,
        r.Assignment(PROMPT, 0, 1, 1, 0, 1, None, None, 1000),
        request("a", 0, 2000, [USER]),
        ended("a", 0, 5, 3000),
        request("b", 5, 3500, [AGAIN], (0, 5)),
        request("b", 5, 3600, [AGAIN], (0, 5)),  # repeated by another gateway
        ended("b", 5, 9, 4500),
        request("c", 9, 5000, [{"role": "user", "content": "other"}], (0, 5)),
        ended("c", 9, 12, 5100, "length"),
        request("d", 12, 5500, [USER]),
        r.EpisodeEnd("p0.0", 1, 0, 1, (), 1.0, None, None, 6000),
        r.Trajectory(
            *(PROMPT, 0, 1, 1, 0, 1, EMPTY, "", (), None, "stop", None, 0, None, 6100),
            conversations=kept,
        ),
    ]


def test_turns_form_a_tree_with_times() -> None:
    found = turns_of(history([USER, CALL, AGAIN, DONE]))
    assert found is not None
    assert [(turn.number, turn.after, turn.depth) for turn in found.turns] == [
        *((1, None, 0), (2, 1, 0), (3, 1, 1), (4, None, 0)),
    ]
    assert [turn.seconds for turn in found.turns] == [1.0, 1.0, 0.1, None]
    assert found.times == (1.0, 2.1, 1.9)
    assert [turn.response_tokens for turn in found.turns] == [3, 2, 1, 0]
    assert [turn.response for turn in found.turns] == [CALL, DONE, None, None]


def test_turns_are_printed_with_calls_and_branches() -> None:
    found = turns_of(history([USER, CALL, AGAIN, DONE]))
    assert found is not None
    summary, *lines = turn_lines(found)
    assert summary == "turns: 4; 2.10 s in requests, 1.90 s between them (tools), 1.00 s before the first"
    assert (
        lines[0].strip()
        == '1    1.000 s  new conversation: 0+2 tokens, 3 drawn in 1.00 s  [user] 2 + 3 → add({"a": 2})'
    )
    assert lines[1].endswith("after 1: 5+2 tokens, 2 drawn in 1.00 s  [tool] 5 → it is 5")
    assert "    after 1: 5+2 tokens, 1 drawn in 0.10 s (length)" in lines[2]
    assert lines[2].endswith("(not trained)")
    assert lines[3].endswith("not answered  [user] 2 + 3")


def test_turns_are_printed_without_control_characters() -> None:
    found = turns_of(history([USER, CALL, AGAIN, {**DONE, "content": "\x1b[2Jit"}]))
    assert found is not None
    assert list(turn_lines(found))[2].endswith(r"→ \x1b[2Jit")


def test_turns_of_other_trajectories_are_none() -> None:
    assert turns_of([PROMPT]) is None


def test_turns_are_json_ready() -> None:
    found = turns_of(history())
    assert found is not None
    plain = json.loads(json.dumps(turns_to_plain(found)))
    assert (plain["model_s"], plain["agent_s"], plain["waiting_s"]) == (2.1, 1.9, 1.0)
    assert plain["turns"][0]["response"] is None


def test_messages_that_do_not_fit_the_turns_are_left_out() -> None:
    found = turns_of(history([USER, CALL]))
    assert found is not None
    assert [turn.response for turn in found.turns] == [None] * 4


def test_turns_end_with_the_rewards_of_their_conversations() -> None:
    records = history([USER, CALL, AGAIN, DONE], [USER, DONE])
    segments = (r.Segment(2, (r.TokenRange(0, 5), r.TokenRange(9, 12))), r.Segment(2, (r.TokenRange(0, 9),)))
    end = r.EpisodeEnd("p0.0", 1, 0, 1, segments, 1.0, None, None, 6000, rewards=(0.5, 0.25))
    found = turns_of([*records, end, r.Experience(records[-1], 0.375, (), None, 0, (1.0, -0.25))])
    assert found is not None
    assert [turn.reward for turn in found.turns] == [None, -0.25, 1.0, None]
    lines = list(turn_lines(found))
    assert lines[2].endswith("(conversation's reward -0.25)")
