"""Samples as text: columns in a terminal, colours by logprob, the cut of long responses, the marks of a comparison."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from record_samples import SAMPLES, TRAJECTORY
from rich.console import Console
from rich.style import Style
from tokenizers import Tokenizer, decoders, models

from pipelines.inspect.log.samples import AnswerChange, SampleComparison, SampleGroup
from pipelines.present.sample_text import SampleStyle, comparison_texts, group_texts, groups_json, shortened
from pipelines.present.turns import with_speakers
from schemas import records as r
from schemas.columns import flags, floats, token_ids

SCORED = next(each for each in SAMPLES.values() if isinstance(each, r.Experience))
WORDS = ("ab", "cd", "ef", "gh")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, "ab"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def sample(member: int, tokens: list[int], reward: float = 1.0, text: str = "") -> r.Experience:
    response = r.Response(
        token_ids(tokens),
        floats([-0.05, -9.0, -0.05, -0.05][: len(tokens)]),
        flags([at != 2 for at in range(len(tokens))]),
    )
    spans = (r.VersionSpan(r.PolicyVersion(1, 2), len(tokens)),)
    trajectory = replace(TRAJECTORY, member=member, response=response, text=text or "text", version_spans=spans)
    return replace(SCORED, trajectory=trajectory, reward=reward)


def group(*samples: r.Experience) -> SampleGroup:
    return SampleGroup(samples[0].trajectory.prompt, samples)


def printed(parts: object, width: int = 100) -> str:
    output = io.StringIO()
    console = Console(file=output, width=width, force_terminal=True, color_system="256", legacy_windows=False)
    for part in parts:  # type: ignore[attr-defined]
        console.print(part, soft_wrap=True, highlight=False, markup=False)
    return output.getvalue()


def test_samples_stand_side_by_side_in_a_terminal() -> None:
    groups = [group(sample(0, [0]), sample(1, [0]))]
    wide, narrow = (printed(group_texts(groups, SampleStyle(width)), width).splitlines() for width in (160, 60))
    assert any("p12.0" in line and "p12.1" in line for line in wide)
    assert not any("p12.0" in line and "p12.1" in line for line in narrow)


def test_tokens_have_the_colours_of_their_logprobs(model: Path) -> None:
    groups = [group(sample(0, [0, 1, 2]))]
    text = printed(group_texts(groups, SampleStyle(100, model=model)))
    assert "\x1b[38;5;46mab" in text  # nearly certain
    assert "\x1b[38;5;196mcd" in text  # very improbable
    assert "\x1b[38;5;245mef" in text  # of the environment
    assert "logprob ≥ -0.1" in text
    without = printed(group_texts(groups, SampleStyle(100, colour="none", model=model)))
    assert "38;5" not in without
    assert "logprob" not in without


def episode(environment: str, tokens: list[int]) -> r.Experience:
    """Tokens of the model, one of its environment, and the model's again."""
    one = sample(0, tokens, text="3")
    prompt = replace(one.trajectory.prompt, environment=environment, token_ids=token_ids([3, 2]))
    ended = r.Episode((1.0,), "done")
    return replace(one, trajectory=replace(one.trajectory, prompt=prompt, episode=ended))


def test_samples_of_an_agent_have_its_turns_and_answer(model: Path) -> None:
    shown = group(episode("agent", [0, 1, 2, 3]))
    lines = [line.strip() for line in printed(group_texts([shown], SampleStyle(model=model))).splitlines()]
    assert any("2 turns" in line for line in lines)
    begin = lines.index("[agent]")
    assert lines[begin : begin + 10] == [
        *("[agent]", "ghef", "[model]", "abcd", "[agent]", "ef", "[model]", "gh", "[answer]", "3"),
    ]
    (one,) = groups_json([shown], model)
    (each,) = one["samples"]
    assert each["text"] == "3"
    said = [("agent", "ghef"), ("model", "abcd"), ("agent", "ef"), ("model", "gh")]
    assert [(turn["from"], turn["text"]) for turn in each["turns"]] == said


def test_samples_of_an_environment_have_its_turns(model: Path) -> None:
    shown = group(episode("calculator", [0, 1, 2, 3]))
    coloured = printed(group_texts([shown], SampleStyle(100, model=model)))
    assert all(each in coloured for each in ("[model]", "[environment]", "\x1b[38;5;245mef"))
    assert "[answer]" not in coloured
    assert [turn["from"] for turn in groups_json([shown], model)[0]["samples"][0]["turns"]] == [
        *("model", "environment", "model"),
    ]


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ("done", "ended by the environment"),
        ("turns", "ended by the limit of turns"),
        ("length", "ended by the limit of tokens"),
        ("failed", "the environment failed"),
    ],
)
def test_samples_of_environments_have_turn_rewards_and_endings(model: Path, ending: r.Ending, expected: str) -> None:
    one = episode("calculator", [0, 1, 2, 3])
    ended = replace(
        one, trajectory=replace(one.trajectory, episode=r.Episode((0.0, 0.5), ending), token_sampler="vllm")
    )
    text = printed(group_texts([group(ended)], SampleStyle(model=model)))
    assert f"2 turns, {expected}" in text
    assert "[model, reward 0]" in text
    assert "[model, reward 0.5]" in text
    (each,) = groups_json([group(ended)], model)[0]["samples"]
    assert each["token_sampler"] == "vllm"
    assert (each["ending"], [turn.get("reward") for turn in each["turns"]]) == (ending, [0.0, None, 0.5])


def test_turns_that_end_a_line_leave_no_empty_line() -> None:
    one = episode("calculator", [0, 1, 2, 3]).trajectory
    pieces = [("1", ""), ("7\n", ""), ("higher\n", ""), ("8", "")]
    text = "".join(piece for piece, _ in with_speakers(one, pieces, None, ""))
    assert text == "[model]\n17\n[environment]\nhigher\n[model]\n8\n"


def test_samples_without_tokenizer_or_episode_have_no_turns(model: Path) -> None:
    plain = replace(SCORED, trajectory=replace(sample(0, [0, 1, 2]).trajectory, episode=None))
    for shown, folder in ((group(episode("agent", [0, 1, 2])), None), (group(plain), model)):
        assert "[model]" not in printed(group_texts([shown], SampleStyle(model=folder)))
        assert "turns" not in groups_json([shown], folder)[0]["samples"][0]


def test_comparison_underlines_the_tokens_that_differ(model: Path) -> None:
    change = AnswerChange(group(sample(0, [0, 1, 3], 0.0)), group(sample(0, [0, 3, 3], 1.0)))
    versions = (r.PolicyVersion(1, 0), r.PolicyVersion(1, 2))
    text = printed(comparison_texts(SampleComparison(versions, [change]), 5, SampleStyle(100, model=model)))
    assert "reward 1 better, 0 worse, 0 equal" in text
    assert "\x1b[4;38;5;196mcd" in text
    assert "\x1b[38;5;46mab" in text


def test_long_responses_are_cut_in_the_middle() -> None:
    pieces = [(letter * 100, Style()) for letter in "abcdefghij"]
    text = "".join(part for part, _ in shortened(pieces, 200, Style()))
    assert text == "a" * 100 + "b" * 20 + "\n… 800 characters …\n" + "j" * 80
    assert shortened(pieces, 1000, Style()) == pieces


def test_empty_response_is_shown_as_empty() -> None:
    empty = replace(sample(0, [0], text=" \n"), error=None)
    assert "(empty response)" in printed(group_texts([group(empty)], SampleStyle()))


def test_control_characters_are_escaped_outside_a_terminal() -> None:
    from pipelines.present.view.console import console

    output = io.StringIO()
    for part in group_texts([group(sample(0, [0], text="x\x1b[2Jy"))], SampleStyle()):
        console(file=output, width=1000).print(part, highlight=False, markup=False)
    assert "x\\x1b[2Jy" in output.getvalue()
