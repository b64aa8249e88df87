"""`laminar samples`: the choice of groups, and the same questions under two versions, against a real broker."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer
from record_samples import PROMPT, SAMPLES, TRAJECTORY

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from pipelines.cli.samples import _known_tasks
from pipelines.inspect.log.samples import SampleFilter, find_groups, groups_at
from schemas import records as r
from schemas.codec import encode
from schemas.columns import flags, floats, token_ids
from schemas.topics import EXPERIENCES, RELAY

RUN = "samples-run"
GROUPS = 200
Laminar = Callable[..., tuple[int, str, str]]
SCORED = next(each for each in SAMPLES.values() if isinstance(each, r.Experience))
MANIFEST = next(each for each in SAMPLES.values() if isinstance(each, r.WeightVersion))
GREEDY, SAMPLED = replace(PROMPT.sampling, temperature=0.0), replace(PROMPT.sampling, temperature=1.0)


def scored(
    number: int, member: int, reward: float, version: int, question: str, text: str = "a response", **prompt: Any
) -> r.Experience:
    response = r.Response(token_ids([1, 2]), floats([-0.1, -0.1]), flags([True, True]))
    asked = replace(PROMPT, number=number, text=question, reference='{"answer": 7}', environment="", **prompt)
    spans = (r.VersionSpan(r.PolicyVersion(1, version), 2),)
    trajectory = replace(TRAJECTORY, prompt=asked, member=member, response=response, text=text, version_spans=spans)
    return replace(SCORED, trajectory=trajectory, reward=reward, scored_at=1000 * number + member, error=None)


def training(number: int, member: int, reward: float) -> r.Experience:
    task = "gcd" if number % 2 else "sums"
    sampling = {"purpose": "train", "task": task, "samples": 2, "sampling": SAMPLED}
    return scored(number, member, reward, number // 50, f"question {number}?", **sampling)


def evaluated(number: int, reward: float, version: int, sampling: r.Sampling = GREEDY) -> r.Experience:
    asked = {"purpose": "evaluation", "task": "sums", "samples": 1, "sampling": sampling}
    return scored(number, 0, reward, version, f"held-out {number % 3}?", f"{version} says {reward:g}", **asked)


@pytest.fixture(scope="module")
def client(broker: Broker) -> ClientProperties:
    """Two hundred training groups of two, the reward of group n about n / 200, the last one incomplete; three held-out
    questions under versions 1.0, 1.2 and 1.3, the second of which is answered worse and worse.
    """
    client = ClientProperties.at(broker.bootstrap_servers)
    name = EXPERIENCES.name(RUN)
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(name, 2), TopicSpec(RELAY.name(RUN), 1)])
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers)

    def write(topic: str, *rows: Any, partition: int = 0, key: bytes = b"k") -> None:
        value, headers = encode(*rows)
        producer.send(topic, value, key, list(headers), partition)

    for number, version in ((0, 0), (3, 2), (6, 3)):
        write(name, *(evaluated(number + at, 1.0 - at * number / 6, version) for at in range(2)))
        write(name, evaluated(number + 2, 0.5, version), evaluated(number + 20, 0.0, version, SAMPLED), partition=1)
    for number in range(GROUPS):
        for member in (0, 1) if number < GROUPS - 1 else (0,):
            write(name, training(number, member, number / GROUPS + member / 1000), partition=number % 2)
    for number in range(4):
        version = r.PolicyVersion(1, number)
        write(RELAY.name(RUN), replace(MANIFEST, version=version, parent=None), key=str(version).encode())
    producer.flush()
    producer.close()
    return client


@pytest.fixture
def laminar(client: ClientProperties, command: Laminar) -> Laminar:
    return lambda *words: command("samples", *words, "--run", RUN, "-b", client.bootstrap_servers)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ["p198", "p197", "p196"]),  # p199 is incomplete
        (("-n", "1", "--task", "gcd"), ["p197"]),
        (("--best", "-n", "2"), ["p198", "p197"]),
        (("--worst", "-n", "2"), ["p0", "p1"]),
        (("--worst", "-n", "1", "--version", "1.2"), ["p100"]),
        (("--best", "-n", "1", "--version", "latest", "--task", "sums"), ["p198"]),
        (("--heldout", "--worst", "-n", "2"), ["e26", "e23"]),  # the newest first among equals
        (("e1.0", "p7"), ["p7", "e1"]),
        (("p199",), ["p199"]),
    ],
)
def test_samples_selects_groups(laminar: Laminar, words: tuple[str, ...], expected: list[str]) -> None:
    code, out, err = laminar(*words, "--json")
    assert code == 0, err
    assert [group["prompt"] for group in json.loads(out)] == expected


@pytest.mark.parametrize(("words", "members"), [(("--best",), [1, 0]), (("--worst",), [0, 1]), ((), [0, 1])])
def test_samples_of_a_group_are_in_the_order_of_the_groups(
    laminar: Laminar, words: tuple[str, ...], members: list[int]
) -> None:
    (group,) = json.loads(laminar(*words, "-n", "1", "--json")[1])
    assert [int(sample["trajectory"].rpartition(".")[2]) for sample in group["samples"]] == members


def test_samples_show_question_reference_and_rewards(laminar: Laminar) -> None:
    assert laminar("p7")[1].splitlines() == [
        "p7  gcd, 2 samples, mean reward 0.04",
        "  question   question 7?",
        "  reference  7",
        "  reward 0.04, conversations 1.00, 0.50  p7.0, version 1.0, 2 tokens, 1 turn, ended by the environment",
        "    a response",
        "  reward 0.04, conversations 1.00, 0.50  p7.1, version 1.0, 2 tokens, 1 turn, ended by the environment",
        "    a response",
        "",
    ]
    assert "1 of 2 samples" in laminar("p199")[1]
    assert "… and 1 more (--per-prompt 0 shows all)" in laminar("p7", "--per-prompt", "1")[1]


def test_samples_compare_first_and_last_version(laminar: Laminar) -> None:
    code, out, _ = laminar("--diff")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "version 1.0 → 1.3: 3 questions answered by both; reward 0 better, 1 worse, 2 equal"
    assert lines[2] == "e7  sums, reward 1.00 → 0.00"
    assert [line.strip() for line in lines if "says" in line][:2] == ["0 says 1", "3 says 0"]


def test_samples_compare_two_named_versions(laminar: Laminar) -> None:
    found = json.loads(laminar("--version", "1.2", "1.0", "-n", "1", "--json")[1])
    assert (found["versions"], found["better"], found["worse"], found["equal"]) == (["1.0", "1.2"], 0, 1, 2)
    (question,) = found["questions"]
    assert (question["question"], question["change"]) == ("held-out 1?", -0.5)
    assert question["before"]["samples"][0]["text"] == "0 says 1"


def test_samples_of_an_unknown_task_name_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[prompts]\ntasks = [{name = 'rev'}, {task = 'gcd'}]\n")
    assert _known_tasks("rv", tmp_path) == " (did you mean 'rev'?)"
    assert _known_tasks("double", tmp_path) == " (it must be one of ['gcd', 'rev'])"
    assert (_known_tasks("gcd", tmp_path), _known_tasks("rv", None)) == ("", "")


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (("--task", "gdc"), 1, "has no scored training samples of task 'gdc'"),
        (
            ("--version", "1.3", "--heldout", "--task", "gcd"),
            1,
            "no scored held-out samples of task 'gcd' of version 1.3",
        ),
        (("p5000",), 1, "no scored samples of prompt p5000"),
        (("--diff", "--task", "gcd"), 1, "by two versions to the same question: try --training"),
        (("--best", "--worst"), 2, "exclude each other"),
        (("--version", "1.0,1.1,1.2"), 2, "two versions are compared"),
        (("--diff", "p3"), 2, "do not apply to a comparison"),
        (("p3x",), 2, "is not a prompt id"),
        (("--version", "newest"), 2, "not a policy version"),
    ],
)
def test_samples_name_what_is_missing(laminar: Laminar, words: tuple[str, ...], code: int, reason: str) -> None:
    exit_code, _, err = laminar(*words)
    assert exit_code == code
    assert reason in " ".join(err.replace("│", " ").split())


def test_newest_samples_are_read_from_the_end(client: ClientProperties, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.inspect.log import samples

    read = []
    original = samples.read_chunks

    def counting(*arguments: Any, **options: Any) -> Any:
        for chunk in original(*arguments, **options):
            read.append(len(chunk.records))
            yield chunk

    monkeypatch.setattr(samples, "read_chunks", counting)
    find_groups(client, RUN, SampleFilter("train"), "newest", 3)
    assert sum(read) < 2 * 2 * samples.FIRST_WINDOW + GROUPS


def test_groups_at_a_share_of_the_topic_are_in_order(client: ClientProperties) -> None:
    wanted = SampleFilter("train")
    first, middle = (groups_at(client, RUN, wanted, share)[0].prompt.number for share in (0.0, 0.5))
    assert first < 4
    assert 80 < middle < 120
