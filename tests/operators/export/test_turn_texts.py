"""The views `trl`, `sft` and `preference` have texts whose tokens are those drawn, with each kind of tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from export_factories import experience, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import KINDS, tokenizer

from infra.models.chat import continuation
from operators.export.config import Contents
from schemas.columns import flags, floats, token_ids
from schemas.records import Conversation, Experience, Message

TEXTS = st.text("ab 17.\n<é🙂", max_size=12)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model folder with a tokenizer of each kind."""
    made = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in made.items():
        tokenizer(kind).save_pretrained(folder)
    return made


@cache
def encode(kind: str, text: str) -> list[int]:
    return tokenizer(kind).encode(text, add_special_tokens=False)


def decode(kind: str, tokens: list[int]) -> str:
    return str(tokenizer(kind).decode(tokens, skip_special_tokens=True))


def drawn(kind: str, prompt: str, parts: list[list[int]], environment: str = "") -> Experience:
    """A trajectory of tokens `parts`, alternately turns and observations, whose texts were decoded alone."""
    made = experience(0)
    tokens = [token for part in parts for token in part]
    mask = [not number % 2 for number, part in enumerate(parts) for _ in part]
    messages = [{"role": "user", "content": prompt}]
    messages += [
        {"role": "user" if number % 2 else "assistant", "content": decode(kind, part)}
        for number, part in enumerate(parts)
    ]
    asked = replace(made.trajectory.prompt, text=prompt, token_ids=token_ids(encode(kind, prompt)))
    conversations = (Conversation(0, len(asked.token_ids), json.dumps(messages)),) if environment else ()
    trajectory = replace(
        made.trajectory,
        prompt=replace(asked, environment=environment),
        response=replace(
            made.trajectory.response,
            token_ids=token_ids(tokens),
            logprobs=floats([-0.5] * len(tokens)),
            loss_mask=flags(mask),
        ),
        text=decode(kind, tokens),
        conversations=conversations,
    )
    return replace(made, trajectory=trajectory)


def view(name: str, folder: Path | None, *experiences: Experience) -> list[dict]:
    contents = Contents("run", "experiences", view=name, tokenizer=str(folder or ""))
    return contents.view_rows(rows_of(*experiences)).to_pylist()


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=50)
@given(prompt=TEXTS.filter(bool), answer=TEXTS)
def test_texts_of_an_answer_have_the_drawn_tokens(kind: str, prompt: str, answer: str, folders) -> None:
    """Where prompt and answer have such tokens at all: the tokens of a text that begin with those of the prompt."""
    before, whole = encode(kind, prompt), encode(kind, prompt + answer)
    if whole[: len(before)] != before or not answer:
        return
    made = drawn(kind, prompt, [whole[len(before) :]])
    for name in ("trl", "sft"):
        (row,) = view(name, folders[kind], made)
        assert row["prompt"] == prompt
        assert encode(kind, row["prompt"] + row["completion"]) == whole
    worse = replace(made, reward=0.0, trajectory=replace(made.trajectory, member=1))
    (pair,) = view("preference", folders[kind], made, worse)
    assert encode(kind, pair["prompt"] + pair["chosen"]) == encode(kind, pair["prompt"] + pair["rejected"]) == whole


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_texts_of_any_tokens_are_those_in_context(kind: str, data: st.DataObject, folders) -> None:
    """Also for tokens that no text has: the texts are then the best there are, and never fewer than recorded."""
    count = len(tokenizer(kind))
    tokens = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=6))
    prompt = data.draw(TEXTS)
    (row,) = view("trl", folders[kind], drawn(kind, prompt, [tokens]))
    before, whole = (decode(kind, each) for each in (encode(kind, prompt), [*encode(kind, prompt), *tokens]))
    assert row["completion"].endswith(decode(kind, tokens))
    if "\ufffd" not in whole:
        assert before + row["completion"] == whole


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_an_episode_have_the_drawn_tokens(kind: str, folders) -> None:
    prompt, parts = "go on", [" 12", " lower\n", "7 a"]
    tokens = [continuation(tokenizer(kind), part) for part in parts]
    first, second = view("trl", folders[kind], drawn(kind, prompt, tokens, environment="echo"))
    assert (first["prompt"], first["completion"]) == ("go on", " 12")
    assert (second["prompt"], second["completion"]) == ("go on 12 lower\n", "7 a")


def test_texts_are_as_recorded_without_the_tokenizer(folders) -> None:
    made = drawn("always", "go on", [encode("always", "12")])
    assert [view("trl", folder, made)[0]["completion"] for folder in (None, folders["always"])] == ["12", " 12"]
    cut = replace(made, trajectory=replace(made.trajectory, text="another text"))
    assert view("trl", folders["always"], cut)[0]["completion"] == "another text"
    chat = (Message("user", "go on"),)
    asked = replace(made.trajectory.prompt, messages=chat)
    chatted = replace(made, trajectory=replace(made.trajectory, prompt=asked))
    contents = Contents("run", "experiences", view="trl", tokenizer=str(folders["always"]), messages=True)
    (row,) = contents.view_rows(rows_of(chatted)).to_pylist()
    assert row["completion"] == [{"role": "assistant", "content": "12"}], "the chat template puts what precedes it"
