"""Rows, conditions and views of an export: tables in, tables out."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pyarrow as pa
import pytest
from export_factories import experience, rows_of
from record_samples import SAMPLES

from infra.conditions.tables import table_condition
from operators.export.columns import RecordRows, as_table, row_schema
from operators.export.config import Contents
from operators.export.formats import Format, read_table, write_table
from operators.export.tickets import parse_ticket
from operators.export.views import Split, default_split, plain_answer, view_of
from schemas.block import Block
from schemas.columns import flags
from schemas.identity import Purpose
from schemas.records import Conversation, Experience, Message
from schemas.topics import CATALOGUE, EXPERIENCES, SETTLED

ROWS = rows_of(experience(0, 0, 1.0), experience(0, 1, 0.25), experience(1, 0, 0.5), experience(1, 1, 0.5, tokens=0))


@pytest.mark.parametrize("short_name", CATALOGUE)
def test_rows_of_every_topic_round_trip_in_every_format(short_name: str, tmp_path) -> None:
    topic = CATALOGUE[short_name]
    blocks = [
        RecordRows.of_one(Block.of([SAMPLES[kind]] * 2), at, 1000 + at) for at, kind in enumerate(topic.record_classes)
    ]
    table = as_table(topic, 3, blocks * 2)
    table.validate(full=True)
    assert len(table) == 4 * len(topic.record_classes)
    assert table["kafka_row"].to_pylist()[:2] == [0, 1]
    for kind in ("parquet", "arrow", "jsonl"):
        form: Format = kind
        write_table(tmp_path / kind, table, form)
        assert read_table(tmp_path / kind, form, row_schema(topic)).to_pylist() == table.to_pylist()


def test_as_table_computes_columns() -> None:
    names = ("trajectory_id", "group_id", "policy_epoch", "policy_version", "staleness", "prompt_tokens")
    assert [ROWS[name].to_pylist()[1] for name in names] == ["p0.1", "p0", 1, 3, 2, 2]
    assert ROWS["policy_version"].to_pylist()[3] is None  # nothing was generated
    assert ROWS["staleness"].to_pylist()[3] is None
    assert ROWS["completion_tokens"].to_pylist() == [4, 4, 4, 0]


def _view(name, rows: pa.Table = ROWS, messages: bool = False) -> list[dict]:
    view = view_of(EXPERIENCES, name, messages)
    transformed = view.transform(table_condition(view.condition, rows.schema).rows(rows))
    assert transformed.schema.equals(view.schema)
    return transformed.to_pylist()


def test_views_transform_rows() -> None:
    assert [(row["prompt"], row["completion"], row["reward"]) for row in _view("trl")[:2]] == [
        ("What is 0 + 1?", "answer 0", 1.0),
        ("What is 0 + 1?", "answer 1", 0.25),
    ]
    assert [row["trajectory_id"] for row in _view("sft")] == ["p0.0", "p1.0", "p1.1"]
    (pair,) = _view("preference")  # the answers of the other group have equal rewards
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == ("What is 0 + 1?", "answer 0", "answer 1")
    prompts = _view("verl")
    assert [row["extra_info"] for row in prompts] == [{"split": "train", "index": 0}, {"split": "train", "index": 1}]
    assert prompts[0]["prompt"] == [{"role": "user", "content": "What is 0 + 1?"}]
    assert prompts[0]["reward_model"] == {"style": "rule", "ground_truth": "1"}
    for name in ("trl", "sft", "preference", "verl"):
        assert {row["purpose"] for row in _view(name)} == {"train"}


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ('{"answer":"72"}', "72"),
        ('{"answer":["a","b"],"x":1}', "a"),
        ('{"answer":7}', "7"),
        ('{"tests":[]}', '{"tests":[]}'),
        ("[1]", "[1]"),
        ("plain", "plain"),
    ],
)
def test_plain_answer_of_a_reference(reference: str, answer: str) -> None:
    assert plain_answer(reference) == answer


@pytest.mark.parametrize(("split", "kept"), [("train", ["p0.0", "i0.0"]), ("test", ["e0.0"]), ("all", None)])
def test_split_selects_rows_by_purpose(split: Split, kept: list[str] | None) -> None:
    every = [experience(0), asked_for("evaluation"), asked_for("imported")]
    contents = Contents("run", "experiences", view="trl", split=split)
    rows = contents.view_rows(contents.selected_rows(rows_of(*every)))
    assert rows["trajectory_id"].to_pylist() == (kept or ["p0.0", "e0.0", "i0.0"])


def test_verl_view_has_the_messages_before_the_chat_template() -> None:
    made = experience(1)
    chat = (Message("system", "Be brief."), Message("user", "What is 1 + 1?"))
    prompt = replace(made.trajectory.prompt, text="<system>Be brief.<user>What is 1 + 1?", messages=chat)
    chatted = replace(made, trajectory=replace(made.trajectory, prompt=prompt))
    plain, given = (row["prompt"] for row in _view("verl", rows_of(experience(0), chatted)))
    assert plain == [{"role": "user", "content": "What is 0 + 1?"}]
    assert given == [asdict(message) for message in chat]


def test_verl_view_has_each_held_out_question_once() -> None:
    repeated = [asked_for("evaluation"), asked_for("evaluation", 5), experience(0), experience(1)]
    rows = _view("verl", rows_of(*repeated))
    assert [(row["purpose"], row["extra_info"]["index"]) for row in rows] == [
        ("evaluation", 0),
        ("train", 0),
        ("train", 1),
    ]


def asked_for(purpose: Purpose, number: int = 0) -> Experience:
    made = experience(0)
    prompt = replace(made.trajectory.prompt, purpose=purpose, number=number)
    return replace(made, trajectory=replace(made.trajectory, prompt=prompt))


def test_trainer_views_leave_out_held_out_questions_by_default() -> None:
    splits = {name: default_split(name) for name in ("full", "trl", "sft", "preference", "verl")}
    assert splits == {"full": "all", **dict.fromkeys(("trl", "sft", "preference", "verl"), "train")}
    assert parse_ticket(b'{"topic": "experiences", "view": "trl"}').contents("run").split == "train"
    assert parse_ticket(b'{"topic": "experiences", "split": "test"}').contents("run").split == "test"
    with pytest.raises(ValueError, match="split must be one of train, test, all, not 'both'"):
        parse_ticket(b'{"topic": "experiences", "split": "both"}')
    with pytest.raises(ValueError, match="settled have no split"):
        Contents("run", "settled", split="test")


@pytest.mark.parametrize("name", ["trl", "sft", "preference", "verl"])
def test_view_of_no_rows_is_empty(name) -> None:
    assert _view(name, ROWS.slice(0, 0)) == []
    with pytest.raises(ValueError, match="is of experiences"):
        view_of(SETTLED, name)


def episode_of(*contents: str, messages: tuple[Message, ...] = (), reward: float = 1.0) -> Experience:
    """An episode in an environment whose turns and observations after the prompt have `contents`, in turn."""
    made = experience(0, reward=reward, messages=messages)
    said = [asdict(each) for each in messages] or [{"role": "user", "content": made.trajectory.prompt.text}]
    said += [{"role": ("assistant", "tool")[at % 2], "content": content} for at, content in enumerate(contents)]
    asked = replace(made.trajectory.prompt, environment="guess")
    conversation = Conversation(0, 2, json.dumps(said))
    played = replace(made.trajectory, prompt=asked, text="".join(contents), conversations=(conversation,))
    return replace(made, trajectory=played)


@pytest.mark.parametrize("name", ["trl", "sft"])
def test_views_of_turns_have_observations_only_in_prompts(name) -> None:
    rows = rows_of(experience(1), episode_of("7\n", "higher\n", "9\n"))
    plain = [("What is 1 + 1?", "answer 0", 0), ("What is 0 + 1?", "7\n", 0), ("What is 0 + 1?7\nhigher\n", "9\n", 1)]
    assert [(row["prompt"], row["completion"], row["turn"]) for row in _view(name, rows)] == plain
    single, first, second = _view(name, rows, messages=True)
    assert single["prompt"] == [{"role": "user", "content": "What is 1 + 1?"}]
    assert [row["completion"] for row in (single, first, second)] == [
        [{"role": "assistant", "content": text}] for text in ("answer 0", "7\n", "9\n")
    ]
    assert [(each["role"], each["content"]) for each in second["prompt"][1:]] == [
        ("assistant", "7\n"),
        ("tool", "higher\n"),
    ]
    assert first["prompt"] == second["prompt"][:1]


def test_views_as_messages_have_those_of_the_prompt() -> None:
    chat = (Message("system", "Guess."), Message("user", "Begin"))
    single = replace(experience(1, 0, 1.0, messages=chat), error=None)
    worse = experience(1, 1, 0.0, messages=chat)
    rows = rows_of(single, worse, episode_of("7", "higher", "9", messages=chat))
    given = [asdict(each) for each in chat]
    prompts = [row["prompt"] for row in _view("trl", rows, messages=True)]
    assert [prompt[:2] for prompt in prompts] == [given] * 4
    assert [len(prompt) for prompt in prompts] == [2, 2, 2, 4]
    (pair,) = _view("preference", rows, messages=True)  # episodes have none: an observation would be trained
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == (
        given,
        [{"role": "assistant", "content": "answer 0"}],
        [{"role": "assistant", "content": "answer 1"}],
    )


def test_conversations_view_has_episodes_of_environments() -> None:
    (row,) = _view("conversations", rows_of(experience(1), episode_of("7", "higher", "9")))
    assert [each["role"] for each in row["messages"]] == ["user", "assistant", "tool", "assistant"]


def test_conversations_view_has_a_row_for_each_conversation() -> None:
    made = experience(0, tokens=6)
    asked = replace(made.trajectory.prompt, environment="agent")
    calls = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    said = [{"role": "user", "content": "2 + 3"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    conversations = (Conversation(0, 2, json.dumps(said)), Conversation(4, 1, ""))
    mask = flags([True, True, False, True, False, True])
    response = replace(made.trajectory.response, loss_mask=mask)
    played = replace(made.trajectory, prompt=asked, response=response, conversations=conversations)
    first, second = _view("conversations", rows_of(experience(1), replace(made, trajectory=played)))
    assert (first["trajectory_id"], first["conversation"], first["prompt_tokens"]) == ("p0.0", 0, 2)
    assert first["token_ids"] == [1, 2, 5, 5, 5, 5]
    assert first["mask"] == [False, False, True, True, False, True]
    assert first["logprobs"] == [0.0, 0.0, -0.5, -0.5, -0.5, -0.5]
    assert [each["role"] for each in first["messages"]] == ["user", "assistant"]
    assert json.loads(first["messages"][1]["tool_calls"]) == calls
    assert (second["conversation"], second["token_ids"], second["mask"]) == (1, [5, 5], [False, True])
    assert second["messages"] == []
    assert [first["reward"], second["reward"]] == [made.reward] * 2
    own = replace(made, trajectory=played, conversation_rewards=(0.75, -0.5))
    assert [each["reward"] for each in _view("conversations", rows_of(own))] == [0.75, -0.5]
    before = replace(made, trajectory=replace(played, conversations=()))
    (whole,) = _view("conversations", rows_of(before))
    assert (whole["token_ids"], whole["messages"]) == ([1, 2, *[5] * 6], []), "of a release without conversations"
