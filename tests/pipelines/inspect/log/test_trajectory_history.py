"""`laminar trajectory`: the records of one trajectory in causal order, with its tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from record_samples import PROMPT, SAMPLES, TRAJECTORY
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from infra.kafka.admin import admin_client
from infra.kafka.lag import list_groups
from infra.kafka.properties import ClientProperties
from infra.kafka.topic_reader import first_offset
from infra.models.demo import build_demo_tokenizer
from infra.models.token_texts import token_texts
from pipelines.inspect.log.describe import describe_outcome, describe_record
from pipelines.inspect.log.history import TrajectoryHistory, _prompt_number, _TrajectorySearch, history_of
from pipelines.inspect.log.matching import MatchingRecord
from pipelines.present.token_colours import SCALE, Tokens, coloured, level
from schemas.identity import parse_trajectory_id
from schemas.records import (
    DeadLetter,
    Experience,
    MicroBatch,
    Pause,
    RewardComponent,
    Settled,
    Trajectory,
    WeightVersion,
)
from schemas.topics import BATCHES, EXPERIENCES, PROMPTS, SETTLED, Topic, run_prefix

RUN = "example-run"
Laminar = Callable[..., tuple[int, str, str]]


def test_trajectory_lists_its_records_in_causal_order(laminar: Laminar) -> None:
    code, out, _ = laminar("trajectory", "p3.1", "--json")
    history = json.loads(out)
    assert code == 0
    assert [(event["topic"], event["partition"], event["offset"]) for event in history["events"]] == [
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
    assert history["outcome"] == (
        "chain_sum, stop after 6 tokens, generated under version 1.1, reward 1.25, in batch 7, decided when its "
        "version was 1 version behind the newest, trained into version 1.2"
    )
    tokens = history["tokens"]
    assert (tokens["ids"], tokens["texts"], tokens["versions"]) == ([0, 1, 2, 3, 4, 5], None, ["1.1"] * 6)
    assert tokens["logprobs"][3] == -9.0
    assert tokens["from_policy"] == [True, True, True, True, False, True]


def test_trajectory_describes_its_records(laminar: Laminar) -> None:
    lines = laminar("trajectory", "p3.1")[1].splitlines()
    assert [line.split(maxsplit=4)[4] for line in lines[:7]] == [
        "prompt, 2 samples: What is 3 + 1?",
        "assigned to replica 0, lease 1",
        "replica 0, lease 1: 2 tokens after the first 0",
        "plan 1-1 (repack) moves it",
        "replica 1 reserves capacity for it, plan 1-1",
        "replica 0 must hand it over to replica 1, plan 1-1",
        "replica 0, lease 1: 1 token after the first 2; handed over to replica 1, lease 2",
    ]
    assert lines[7].endswith("assigned to replica 1 under 1.1, lease 2, to resume after 3 tokens")
    assert any(line.endswith("batched when its version was 1 version behind the newest") for line in lines)
    begin = lines.index("2 turns, ended by the environment")
    assert lines[begin + 1 : begin + 4] == [
        *("    1 model, reward 0, 4 tokens", "    2 environment, 1 token", "    3 model, reward 1, 1 token"),
    ]
    assert not any("logprob" in line for line in lines)  # no legend of colours without a terminal
    assert any(line.startswith("p3.1: chain_sum, stop after 6 tokens") for line in lines)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Trajectory, "stop on replica 0, lease 5, attempt 1, version 2.17, by vLLM's sampler"),
        (WeightVersion, "version 2.17, batches [9], step 17"),
        (DeadLetter, "ScoreTrajectory cannot process laminar.a.trajectories 1:5: not JSON"),
        (Pause, "request 3: the run is paused"),
    ],
)
def test_record_is_described_in_one_line(kind: type, text: str) -> None:
    assert describe_record(SAMPLES[kind]) == text


def test_reward_is_described_by_its_parts_and_weights() -> None:
    scored = SAMPLES[Experience]
    assert isinstance(scored, Experience)
    parts = (("environment", 1.0, 1.0), ("turns", -1.0, 0.05), ("accuracy", 0.0, 0.0))
    rewarded = replace(
        scored, reward=0.95, components=tuple(RewardComponent(*part) for part in parts), error="it\n  in"
    )
    expected = "reward 0.95 = environment 1 × 1 + turns -1 × 0.05, accuracy 0 (weight 0): it"
    assert describe_record(rewarded) == expected


def test_batch_and_outcome_of_one_transaction_are_in_time_order(
    laminar: Laminar, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = _TrajectorySearch.records_of

    def settled_later(self: _TrajectorySearch, topic: Topic, *args: Any, **options: Any) -> Iterator[MatchingRecord]:
        later = 60_000 if topic is SETTLED else 0
        return (each._replace(timestamp=each.timestamp + later) for each in original(self, topic, *args, **options))

    monkeypatch.setattr(_TrajectorySearch, "records_of", settled_later)
    events = json.loads(laminar("trajectory", "p3.1", "--json")[1])["events"]
    assert [event["topic"] for event in events][-4:-2] == ["batches", "settled"]


def test_trajectory_in_flight_is_not_finished(laminar: Laminar) -> None:
    history = json.loads(laminar("trajectory", "p9.0", "--json")[1])
    assert [event["topic"] for event in history["events"]] == ["prompts", "plans", "progress"]
    assert (history["outcome"], history["tokens"]) == ("not finished", None)


def test_imported_trajectory_begins_as_an_experience(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = replace(PROMPT, number=0, purpose="imported", round="first/experiences 0:17.3")
    scored = replace(SAMPLES[Experience], trajectory=replace(TRAJECTORY, prompt=asked, member=0), reward=1.0)
    log: dict[Topic, Any] = {
        EXPERIENCES: scored,
        SETTLED: Settled("i0.0", 0, "imported", "", 7, 2, 4, 0),
        BATCHES: SAMPLES[MicroBatch],
    }

    def found(topic: Topic) -> Iterator[MatchingRecord]:
        return iter([MatchingRecord(topic.short_name, 0, 0, 0, log[topic])])  # no other topic is searched

    version = MatchingRecord("relay", 0, 0, 0, SAMPLES[WeightVersion])
    monkeypatch.setattr(_TrajectorySearch, "records_of", lambda self, topic, *args, **options: found(topic))
    monkeypatch.setattr(_TrajectorySearch, "versions_trained_on", lambda self, batch: iter([version]))
    parts = history_of(ClientProperties.at("nowhere.invalid:9092"), RUN, parse_trajectory_id("i0.0"))
    history = TrajectoryHistory([event for part in parts for event in part])
    assert [event.topic for event in history.events] == ["experiences", "settled", "batches", "relay"]
    assert history.trajectory == scored.trajectory
    assert describe_outcome(history).endswith(
        "imported from first/experiences 0:17.3, reward 1, in batch 7, decided when its version was 2 versions behind "
        "the newest, trained into version 2.17"
    )


def test_trajectory_rejects_unknown_and_invalid_ids(laminar: Laminar) -> None:
    assert laminar("trajectory", "p77.0")[::2] == (1, f"laminar: the log of run {RUN} has no trajectory p77.0\n")
    assert laminar("trajectory", "seven")[0] == 2


@pytest.mark.parametrize(("number", "offset"), [(0, 0), (3, 3), (9, 9), (10, None)])
def test_first_offset_finds_a_prompt_by_bisection(
    laminar: Laminar, log_client: ClientProperties, number: int, offset: int | None
) -> None:
    assert first_offset(log_client, PROMPTS.name(RUN), 0, _prompt_number, number) == offset


def test_inspection_joins_no_consumer_group(laminar: Laminar, log_client: ClientProperties) -> None:
    laminar("trajectory", "p3.1")
    laminar("lineage", "latest")
    with admin_client(log_client) as admin:
        assert list_groups(admin, run_prefix(RUN)) == []


def test_token_texts_join_to_the_text(tmp_path: Path) -> None:
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


def test_token_texts_show_bytes_that_are_no_text(tmp_path: Path) -> None:
    """A model with byte tokens may generate them in any order."""
    words = [f"<0x{byte:02X}>" for byte in range(256)] + ["<unk>", "B", "▁a"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for ids in ([257, 0xE2, 257], [0xE2, 0x82, 0xAC, 258], [0xFF] * 5, [257, 0xE2, 258, 0x82, 257, 257]):
        texts = token_texts(tmp_path, ids)
        assert len(texts) == len(ids)
        assert "".join(texts).count("B") == ids.count(257)
    assert "".join(token_texts(tmp_path, [0xE2, 0x82, 0xAC])) == "€"
    turned = token_texts(tmp_path, [257, 0xE2, 0x82, 257, 258], turns={3})  # the environment's text begins there
    assert ("".join(turned[:3]), "".join(turned[3:])) == ("B\N{REPLACEMENT CHARACTER}", "B a")
    chance = random.Random(0)
    for _ in range(200):
        ids = [chance.randrange(259) for _ in range(20)]
        assert len(token_texts(tmp_path, ids)) == len(ids)


def test_level_of_a_logprob_that_is_no_number_is_the_last() -> None:
    assert [level(logprob) for logprob in (0.0, -100.0, float("nan"))] == [0, len(SCALE) - 1, len(SCALE) - 1]


def test_coloured_tokens_by_logprob_or_version() -> None:
    tokens = Tokens([5, 6, 7], ["a", "b", "c"], [-0.01, -9.0, 0.0], [True, True, False], ["1.1", "1.2", "1.2"])

    def colours(by: str) -> list[str]:
        _, text, *_ = coloured(tokens, by)
        return [str(span.style) for span in text.spans]

    assert [str(text) for text in coloured(tokens, "none")][1] == "abc"
    likely, unlikely, others = colours("logprob")
    assert len({likely, unlikely, others}) == 3
    first, second, same = colours("version")
    assert len({first, second}) == 2
    assert same == others


def test_tail_shows_the_response_of_a_trajectory_first(laminar: Laminar) -> None:
    for topic in ("trajectories", "experiences"):
        line = laminar("topics", "tail", topic, "-n", "1")[1]
        assert '] "5 — fünf" {' in line


def test_find_shows_people_the_main_columns(laminar: Laminar) -> None:
    words = ("topics", "find", "experiences", "-w", "trajectory_id = 'p4.0'")
    expected = '0:0 {trajectory_id="p4.0" task="chain_sum" policy_version=1 staleness=1 reward=0.5 completion_tokens=6 '
    assert laminar(*words)[1].startswith(expected)
    assert "completion_token_ids" in laminar(*words, "--columns", "all", "-O", "table")[1].lower().replace("-", "_")
    assert "completion_token_ids" in laminar(*words, "-O", "jsonl")[1]
    assert "token_ids" not in laminar(*words, "-O", "table")[1].lower().replace("-", "_")
