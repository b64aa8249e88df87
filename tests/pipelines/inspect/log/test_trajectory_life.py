"""`laminar trajectory`: all that the log says of one trajectory, in order, with its tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.kafka.admin import admin_client
from infra.kafka.lag import list_groups
from infra.kafka.properties import ClientProperties
from infra.kafka.searching import first_offset
from infra.models.demo import build_demo_tokenizer
from infra.models.token_texts import token_texts
from pipelines.inspect.log.history import _prompt_number
from pipelines.present.token_colours import Tokens, coloured
from schemas.topics import PROMPTS, run_prefix

RUN = "a-run-to-read"
Laminar = Callable[..., tuple[int, str, str]]


def test_every_record_of_it_in_the_order_of_its_story(laminar: Laminar) -> None:
    code, out, _ = laminar("trajectory", "p3.1", "--json")
    told = json.loads(out)
    assert code == 0
    assert [(event["topic"], event["partition"], event["offset"]) for event in told["events"]] == [
        ("prompts", 0, 3),
        ("inbox", 0, 1),
        ("progress", 0, 0),
        ("plans", 0, 0),
        ("inbox", 1, 0),
        ("inbox", 0, 2),
        ("progress", 0, 1),
        ("inbox", 1, 1),
        ("progress", 0, 3),
        ("trajectories", 1, 1),
        ("experiences", 1, 0),
        ("settled", 0, 1),
        ("batches", 0, 1),
        ("relay", 0, 2),
        ("relay", 0, 3),
    ]
    assert told["outcome"] == (
        "chain_sum, stop after 6 tokens, under version 1.1, reward 1.25, in batch 7, which made version 1.2"
    )
    tokens = told["tokens"]
    assert (tokens["ids"], tokens["texts"], tokens["versions"]) == ([0, 1, 2, 3, 4, 5], None, ["1.1"] * 6)
    assert tokens["logprobs"][3] == -9.0
    assert tokens["made_by_policy"] == [True, True, True, True, False, True]


def test_in_words(laminar: Laminar) -> None:
    lines = laminar("trajectory", "p3.1")[1].splitlines()
    assert [line.split(maxsplit=4)[4] for line in lines[:7]] == [
        "prompt, 2 samples: What is 3 + 1?",
        "assigned to replica 0, lease 1",
        "replica 0, lease 1: 2 tokens after 0",
        "plan 1-1 (repack) moves it",
        "replica 1 keeps room for it, plan 1-1",
        "replica 0 is to hand it over to replica 1, plan 1-1",
        "replica 0, lease 1: 1 tokens after 2; handed over to replica 1, lease 2",
    ]
    assert lines[7].endswith("assigned to replica 1 under 1.1, lease 2, to go on after 3 tokens")
    assert any(line.startswith("p3.1: chain_sum, stop after 6 tokens") for line in lines)


def test_of_one_that_is_under_way(laminar: Laminar) -> None:
    told = json.loads(laminar("trajectory", "p9.0", "--json")[1])
    assert [event["topic"] for event in told["events"]] == ["prompts", "plans", "progress"]
    assert (told["outcome"], told["tokens"]) == ("not finished", None)


def test_an_unknown_one_and_no_id(laminar: Laminar) -> None:
    assert laminar("trajectory", "p77.0")[::2] == (1, f"laminar: the log of run {RUN} knows no trajectory p77.0\n")
    assert laminar("trajectory", "seven")[0] == 2


@pytest.mark.parametrize(("number", "offset"), [(0, 0), (3, 3), (9, 9), (10, None)])
def test_a_prompt_is_found_by_looking(
    laminar: Laminar, story: ClientProperties, number: int, offset: int | None
) -> None:
    assert first_offset(story, PROMPTS.name(RUN), 0, _prompt_number, number) == offset


def test_looking_joins_no_group(laminar: Laminar, story: ClientProperties) -> None:
    laminar("trajectory", "p3.1")
    laminar("lineage", "latest")
    with admin_client(story) as admin:
        assert list_groups(admin, run_prefix(RUN)) == []


def test_tokens_are_spelt_one_by_one(tmp_path: Path) -> None:
    tokenizer = build_demo_tokenizer(["the answer is"])
    tokenizer.save_pretrained(tmp_path)
    text = "the answer is 12 €!"
    ids = tokenizer.encode(text)
    texts = token_texts(tmp_path, ids)
    assert "".join(texts) == text
    assert len(texts) == len(ids)
    assert texts[0] == "the answer is"
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        token_texts(tmp_path / "nowhere", ids)


def test_colours_tell_how_likely_a_token_was_or_who_made_it() -> None:
    tokens = Tokens([5, 6, 7], ["a", "b", "c"], [-0.01, -9.0, 0.0], [True, True, False], ["1.1", "1.2", "1.2"])

    def colours(by: str) -> list[str]:
        _, text, *_ = coloured(tokens, by)
        return [str(span.style) for span in text.spans]

    assert [str(text) for text in coloured(tokens, "none")][1] == "abc"
    sure, unlikely, others = colours("logprob")
    assert len({sure, unlikely, others}) == 3
    first, second, same = colours("version")
    assert len({first, second}) == 2
    assert same == others
