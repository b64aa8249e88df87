"""Views: datasets in the formats of other trainers. Each view is a pure function of the rows of one file.

Every view but `full` is of experiences. Rows keep their position in the log, so `export verify` works for all views.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from operators.export.columns import LOG_POSITION, row_schema
from schemas.topics import EXPERIENCES, Topic

# The view `conversations`: one row for each trained conversation of an episode.
MESSAGES = pa.list_(
    pa.struct(
        [("role", pa.utf8()), ("content", pa.utf8()), ("tool_calls", pa.utf8()), ("tool_call_id", pa.utf8())],
    )
)
"""Messages in the shape of OpenAI's API; `tool_calls` is JSON."""
COLUMNS: tuple[tuple[str, pa.DataType], ...] = (
    ("trajectory_id", pa.utf8()),
    ("conversation", pa.int64()),
    ("messages", MESSAGES),
    ("token_ids", pa.list_(pa.int32())),
    ("mask", pa.list_(pa.bool_())),
    ("logprobs", pa.list_(pa.float32())),
    ("prompt_tokens", pa.int64()),
    ("reward", pa.float64()),
    ("task", pa.utf8()),
    ("group_id", pa.utf8()),
    ("policy_version", pa.int64()),
    ("purpose", pa.utf8()),
)
_OF_TURNS = "prompt_text", "prompt_messages", "prompt_environment", "completion_text", "conversations"
"""The columns that the turns of the model are read from."""
_OF_TRAJECTORY = ("trajectory_id", "task", "group_id", "policy_version", "purpose")


def conversation_rows(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The conversations of the full rows `table`, in the columns of `schema`: COLUMNS, and the position in the log."""
    rows = [row for trajectory in table.to_pylist() for row in _rows(trajectory, schema)]
    return pa.Table.from_pylist(rows, schema)


def _rows(trajectory: dict[str, Any], schema: pa.Schema) -> Iterator[dict[str, Any]]:
    prompt, response = trajectory["prompt_token_ids"], trajectory["completion_token_ids"]
    masks, logprobs = trajectory["completion_mask"], trajectory["completion_logprobs"]
    before_release = {"start": 0, "prompt_tokens": len(prompt), "messages": ""}  # such records have no conversations
    conversations = trajectory["conversations"] or [before_release]
    ends = [each["start"] for each in conversations[1:]] + [len(response)]
    rewards = trajectory["conversation_rewards"] or [trajectory["reward"]] * len(conversations)
    shared = {name: trajectory[name] for name in schema.names if name in _OF_TRAJECTORY or name.startswith("kafka_")}
    for number, (each, end) in enumerate(zip(conversations, ends, strict=True)):
        own, before = slice(each["start"], end), [] if number else prompt
        yield {
            **shared,
            "conversation": number,
            "messages": [_message(message) for message in json.loads(each["messages"] or "[]")],
            "token_ids": [*before, *response[own]],
            "mask": [*[False] * len(before), *masks[own]],
            "logprobs": [*[0.0] * len(before), *logprobs[own]],
            "prompt_tokens": each["prompt_tokens"],
            "reward": rewards[number],
        }


def _message(message: dict[str, Any]) -> dict[str, Any]:
    content, calls = message.get("content"), message.get("tool_calls")
    return {
        "role": message.get("role"),
        "content": content if content is None or isinstance(content, str) else json.dumps(content, ensure_ascii=False),
        "tool_calls": json.dumps(calls, ensure_ascii=False) if calls else None,
        "tool_call_id": message.get("tool_call_id"),
    }


ViewName = Literal["full", "trl", "verl", "sft", "preference", "conversations"]
Split = Literal["train", "test", "all"]
TEXT_VIEWS: tuple[ViewName, ...] = ("trl", "sft", "preference")
"""Views whose prompts and answers are texts, or lists of messages if the run has a chat template."""
SPLITS: Mapping[Split, str] = {"train": "purpose != 'evaluation'", "test": "purpose = 'evaluation'", "all": ""}
"""The condition of each split: `test` has the questions that are held out from training."""

_ROW_POSITION = pa.schema([LOG_POSITION.field(name) for name in ("kafka_partition", "kafka_offset", "kafka_row")])
_MESSAGES = pa.list_(pa.struct([("role", pa.utf8()), ("content", pa.utf8())]))


class View(NamedTuple):
    """`condition` on the full rows applies beside the user's; `transform` maps the selected rows to `schema`."""

    description: str
    schema: pa.Schema
    condition: str
    transform: Callable[[pa.Table], pa.Table]


def view_of(topic: Topic, name: ViewName, messages: bool = False) -> View:
    """View `name` of `topic`; `messages`: those of TEXT_VIEWS have lists of messages in place of texts.

    Raises ValueError if the view does not exist for this topic.
    """
    if name == "full":
        return View("every field of every record", row_schema(topic), "", lambda table: table)
    if topic is not EXPERIENCES:
        raise ValueError(f"the view {name} is of experiences; {topic.short_name} have only the view full")
    return _text_views(messages)[name] if name in TEXT_VIEWS else _VIEWS[name]


def default_split(view: ViewName) -> Split:
    """The split that a view has unless another is requested: trainers must not see held-out questions."""
    return "all" if view == "full" else "train"


def _schema(*fields: tuple[str, pa.DataType]) -> pa.Schema:
    return pa.schema(
        [*(pa.field(*field) for field in fields), *_ROW_POSITION], metadata=row_schema(EXPERIENCES).metadata
    )


def _turn_view(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A row for each turn of the model, whose prompt is all that precedes the turn."""
    names = [name for name in (*schema.names, *_OF_TURNS) if name in table.schema.names]
    rows = [
        row for trajectory in table.select(dict.fromkeys(names)).to_pylist() for row in _turn_rows(trajectory, schema)
    ]
    return pa.Table.from_pylist(rows, schema)


def _turn_rows(trajectory: dict[str, Any], schema: pa.Schema) -> Iterator[dict[str, Any]]:
    as_messages = schema.field("prompt").type == _MESSAGES
    for number, (before, answer) in enumerate(_turns(trajectory)):
        after_prompt = before[len(_prompt_messages(trajectory)) :]
        text = trajectory["prompt_text"] + "".join(message["content"] for message in after_prompt)
        own = (
            {"prompt": before, "completion": [answer]}
            if as_messages
            else {"prompt": text, "completion": answer["content"]}
        )
        yield {**trajectory, **own, "turn": number}


def _turns(trajectory: dict[str, Any]) -> Iterator[tuple[list[dict[str, str]], dict[str, str]]]:
    """Yield each turn of the model as a message, after the messages before it."""
    prompt = _prompt_messages(trajectory)
    if not trajectory["prompt_environment"]:
        yield prompt, {"role": "assistant", "content": trajectory["completion_text"]}
        return
    for conversation in trajectory["conversations"]:
        messages = json.loads(conversation["messages"] or "[]")
        for at in range(len(prompt), len(messages)):
            if messages[at]["role"] == "assistant":
                yield messages[:at], messages[at]


def _prompt_messages(trajectory: dict[str, Any]) -> list[dict[str, str]]:
    return trajectory["prompt_messages"] or [{"role": "user", "content": trajectory["prompt_text"]}]


def turns_in_context(table: pa.Table, model: Path) -> pa.Table:
    """The full rows `table` with the texts that the turns have after their prompts, by the tokenizer of folder `model`.

    A recorded text was decoded alone, in which many tokenizers drop its first space: prompt and turn encoded together
    were then other tokens than those drawn. A text is kept where its tokens have another one in context.
    """
    from infra.models.token_texts import texts_in_context

    changed = "completion_text", "conversations"
    tokens = "prompt_token_ids", "completion_token_ids", "completion_mask"
    rows = table.select([*dict.fromkeys((*_OF_TURNS, *tokens))]).to_pylist()
    for row in rows:
        runs = groupby(zip(row["completion_token_ids"], row["completion_mask"], strict=True), lambda token: token[1])
        parts = [(drawn, [token_id for token_id, _ in run]) for drawn, run in runs]
        texts = texts_in_context(model, [row["prompt_token_ids"], *(token_ids for _, token_ids in parts)])
        if texts is not None:
            _put_texts(row, [drawn for drawn, _ in parts], texts[1:])
    for name in changed:
        at = table.schema.get_field_index(name)
        column = pa.array([row[name] for row in rows], table.schema.field(at).type)
        table = table.set_column(at, table.schema.field(at), column)
    return table


def _put_texts(row: dict[str, Any], drawn: list[bool], texts: list[str]) -> None:
    """Replace the recorded texts of `row` by `texts` if those only have more at their starts."""
    if not row["prompt_environment"]:
        text = "".join(texts)
        row["completion_text"] = text if text.endswith(row["completion_text"]) else row["completion_text"]
        return
    for conversation in row["conversations"][:1]:  # an environment has one
        messages = json.loads(conversation["messages"] or "[]")
        own = messages[len(_prompt_messages(row)) :]
        if [message["role"] == "assistant" for message in own] != drawn:
            continue
        for message, text in zip(own, texts, strict=True):
            message["content"] = text if text.endswith(message["content"]) else message["content"]
        conversation["messages"] = json.dumps(messages, ensure_ascii=False)


def _question_view(table: pa.Table) -> pa.Table:
    """The prompts; a held-out question, which every evaluation repeats, only once in a file."""
    table = _without_repetitions(table)
    questions = table["prompt_text"].combine_chunks()
    answers = pa.array(map(plain_answer, table["ground_truth"].to_pylist()), pa.utf8())
    return _select_columns(
        _QUESTION_SCHEMA,
        table,
        {
            "data_source": table["task"],
            "prompt": _messages(table, questions),
            "ability": table["task"],
            "reward_model": _struct(style=pa.repeat("rule", len(table)), ground_truth=answers),
            "extra_info": _struct(
                split=pc.if_else(pc.equal(table["purpose"], "evaluation"), "test", "train").combine_chunks(),
                index=table["prompt_number"].combine_chunks(),
            ),
        },
    )


def _messages(table: pa.Table, questions: pa.Array) -> pa.Array:
    """The conversation before the chat template; without one, the text as a message of the user."""
    given = table["prompt_messages"].combine_chunks().cast(_MESSAGES)
    return pc.if_else(pc.greater(pc.list_value_length(given), 0), given, _one_message("user", questions))


def _without_repetitions(table: pa.Table) -> pa.Table:
    """The rows of `table` without those of held-out questions that an earlier row has."""
    heldout = pc.equal(table["purpose"], "evaluation")
    keys = pc.if_else(heldout, table["prompt_text"], table["group_id"])
    numbered = pa.table({"heldout": heldout, "key": keys, "row": pa.arange(0, len(table))})
    first = numbered.group_by(["heldout", "key"], use_threads=False).aggregate([("row", "min")])
    return table.take(first.sort_by("row_min")["row_min"])


def plain_answer(reference: str) -> str:
    """The answer in `reference`, JSON: of several the first; the whole reference if it names none."""
    try:
        entry = json.loads(reference)
    except ValueError:
        return reference
    answer = entry.get("answer") if isinstance(entry, dict) else None
    if isinstance(answer, list) and answer:
        answer = answer[0]
    return reference if answer is None else answer if isinstance(answer, str) else json.dumps(answer)


def _preference_view(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The best and the worst answer of each group whose rewards differ; of equal rewards the first answer."""
    numbered = pa.table({"group": table["group_id"], "reward": table["reward"], "row": pa.arange(0, len(table))})
    best = numbered.sort_by([("reward", "descending"), ("row", "ascending")]).group_by("group", use_threads=False)
    worst = numbered.sort_by([("reward", "ascending"), ("row", "ascending")]).group_by("group", use_threads=False)
    pairs = best.aggregate([("row", "first")]).join(
        worst.aggregate([("row", "first")]), "group", right_suffix="_worst", use_threads=False
    )
    pairs = pairs.sort_by("row_first")
    chosen, rejected = table.take(pairs["row_first"]), table.take(pairs["row_first_worst"])
    differ = pc.greater(chosen["reward"], rejected["reward"])
    chosen, rejected = chosen.filter(differ), rejected.filter(differ)
    texts = {
        "prompt": chosen["prompt_text"].combine_chunks(),
        "chosen": chosen["completion_text"].combine_chunks(),
        "rejected": rejected["completion_text"].combine_chunks(),
    }
    if schema.field("prompt").type == _MESSAGES:
        answers = {name: _one_message("assistant", texts[name]) for name in ("chosen", "rejected")}
        texts = {"prompt": _messages(chosen, texts["prompt"]), **answers}
    return _select_columns(
        schema,
        chosen,
        {
            **texts,
            "reward_chosen": chosen["reward"],
            "reward_rejected": rejected["reward"],
            "rejected_trajectory_id": rejected["trajectory_id"],
        },
    )


def _select_columns(schema: pa.Schema, table: pa.Table, computed: Mapping[str, pa.Array]) -> pa.Table:
    """The columns of `schema`: from `computed`, or else from `table`."""
    columns = [computed[name] if name in computed else table[name] for name in schema.names]
    return pa.Table.from_arrays(columns, schema=schema)


def _one_message(role: str, contents: pa.Array) -> pa.Array:
    messages = pa.StructArray.from_arrays([pa.repeat(role, len(contents)), contents], fields=list(_MESSAGES.value_type))
    return pa.ListArray.from_arrays(pa.arange(0, len(contents) + 1).cast(pa.int32()), messages, type=_MESSAGES)


def _struct(**parts: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays(list(parts.values()), names=list(parts))


_QUESTION_SCHEMA = _schema(
    ("data_source", pa.utf8()),
    ("prompt", _MESSAGES),
    ("ability", pa.utf8()),
    ("reward_model", pa.struct([("style", pa.utf8()), ("ground_truth", pa.utf8())])),
    ("extra_info", pa.struct([("split", pa.utf8()), ("index", pa.int64())])),
    ("purpose", pa.utf8()),
)
_CONVERSATION_SCHEMA = _schema(*COLUMNS)
_VIEWS: Mapping[str, View] = {
    "conversations": View(
        "the conversations of episodes, each with its messages, tokens, mask, logprobs and reward",
        _CONVERSATION_SCHEMA,
        "prompt_environment != '' and finish_reason != 'failed'",
        lambda table: conversation_rows(table, _CONVERSATION_SCHEMA),
    ),
    "verl": View("verl's prompts: one row for each group", _QUESTION_SCHEMA, "member = 0", _question_view),
}


@cache
def _text_views(messages: bool) -> Mapping[str, View]:
    text = _MESSAGES if messages else pa.utf8()
    turns = _schema(
        ("prompt", text),
        ("completion", text),
        ("reward", pa.float64()),
        ("task", pa.utf8()),
        ("ground_truth", pa.utf8()),
        ("trajectory_id", pa.utf8()),
        ("group_id", pa.utf8()),
        ("policy_version", pa.int64()),
        ("purpose", pa.utf8()),
        ("turn", pa.int64()),
    )
    pairs = _schema(
        ("prompt", text),
        ("chosen", text),
        ("rejected", text),
        ("reward_chosen", pa.float64()),
        ("reward_rejected", pa.float64()),
        ("task", pa.utf8()),
        ("trajectory_id", pa.utf8()),
        ("rejected_trajectory_id", pa.utf8()),
        ("group_id", pa.utf8()),
        ("purpose", pa.utf8()),
    )
    return {
        "trl": View(
            "TRL's prompt and completion, with the reward: a row for each turn of the model",
            turns,
            "reward_error is null and prompt_environment != 'agent'",
            lambda table: _turn_view(table, turns),
        ),
        "sft": View(
            "prompt and completion of complete answers with a reward of 0.5 or more: a row for each turn of the model",
            turns,
            "finish_reason = 'stop' and reward_error is null and reward >= 0.5 and prompt_environment != 'agent'",
            lambda table: _turn_view(table, turns),
        ),
        "preference": View(
            "prompt, chosen and rejected: the best and the worst answer of each group, among its rows in one file",
            pairs,
            "reward_error is null and prompt_environment = ''",
            lambda table: _preference_view(table, pairs),
        ),
    }
