"""The warm start: training, measurement, caching by the hash of all inputs, atomic writes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.models.checkpoint_folder import load_model, load_tokenizer
from infra.models.demo import build_demo_model
from infra.models.demo_config import PHRASES, DemoModelConfig
from operators.trainer import warm_start as module
from operators.trainer.imitation import Example, LearningRates, imitate, scheduled
from operators.trainer.warm_start import TRACES, generate, warm_start
from operators.trainer.warm_start_config import WarmStartConfig
from operators.trainer.warm_start_record import RECORD_FILE, read_warm_start

MODEL = DemoModelConfig(hidden_size=32, layers=1, heads=2, kv_heads=1, mlp_size=48, max_positions=64)
TINY = WarmStartConfig(
    model=MODEL, steps=5, batch=8, habit_steps=2, measured=6, measure_every=2, max_new_tokens=6, slip_rate=0.5
)


def sums(count: int, seed: int) -> list[Mapping[str, Any]]:
    """Entries in the format of reasoning-gym's chain_sum."""
    source = random.Random(seed)
    entries: list[Mapping[str, Any]] = []
    for _ in range(count):
        terms = [source.randint(0, 9) for _ in range(4)]
        expression = " + ".join(map(str, terms))
        question = f"State the final answer to the following arithmetic problem: {expression} ="
        entries.append({"question": question, "answer": str(sum(terms)), "metadata": {"expression": expression}})
    return entries


HELDOUT = sums(8, seed=1)
ENTRIES = [entry for entry in sums(60, seed=0) if entry["question"] not in {e["question"] for e in HELDOUT}]


def test_warm_start_writes_model_tokenizer_and_record(tmp_path: Path) -> None:
    progress: list[float] = []
    made = warm_start(TINY, ENTRIES, HELDOUT, tmp_path, lambda share, stage: progress.append(share))
    model, tokenizer = load_model(made.folder), load_tokenizer(made.folder)
    assert model.config.vocab_size == len(tokenizer)
    assert [measured.step for measured in made.curve] == [2, 4, 5, 7]
    assert made == read_warm_start(made.folder)
    assert progress == sorted(progress)
    assert progress[-1] == 1.0
    assert 0 < made.teacher < 1
    assert os.listdir(tmp_path) == [made.folder.name]


def test_warm_start_supports_gcd(tmp_path: Path) -> None:
    entries = [{"question": f"{n}, 4", "answer": "2", "metadata": {"numbers": [n, 4]}} for n in (6, 10, 14, 18)]
    config = replace(TINY, model=replace(MODEL, task="gcd"), slip_rate=0.0)
    assert warm_start(config, entries[:3], entries[3:], tmp_path).teacher == 1.0


@pytest.mark.parametrize(("share", "slip_rate"), [(0.0, 1.0), (0.75, 1.0), (1.0, 1.0), (1.0, 0.0)])
def test_teacher_accuracy_follows_the_configuration(tmp_path: Path, share: float, slip_rate: float) -> None:
    """Without errors every worked answer is correct; with an error rate of 1 only answers without a carry are."""
    entries = sums(400, seed=3)
    config = replace(TINY, careless_share=share, slip_rate=slip_rate, steps=1, habit_steps=0)
    heldout = [entry for entry in HELDOUT if entry["question"] not in {e["question"] for e in entries}]
    always = sum(module.answer_of(TRACES["chain_sum"](e, random.Random(0), 1.0)) == e["answer"] for e in entries) / 400
    assert always < 0.5
    expected = 1 - share * slip_rate * (1 - always)
    assert warm_start(config, entries, heldout, tmp_path).teacher == pytest.approx(expected, abs=0.06)


def test_warm_start_properties_come_from_the_curve() -> None:
    curve = tuple(module.Measured(*each) for each in ((100, 0.3, 0.2), (200, 0.7, 0.4), (260, 0.1, 0.5)))
    made = module.WarmStart(Path(), 0.5, curve, 1.0)
    assert (made.greedy, made.sampled, made.best) == (0.1, 0.5, 0.7)


def test_folder_name_depends_on_all_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = warm_start(TINY, ENTRIES, HELDOUT, tmp_path)
    others = [
        warm_start(replace(TINY, seed=1), ENTRIES, HELDOUT, tmp_path),
        warm_start(replace(TINY, model=replace(MODEL, seed=1)), ENTRIES, HELDOUT, tmp_path),
        warm_start(TINY, ENTRIES[:-1], HELDOUT, tmp_path),
        warm_start(TINY, ENTRIES, HELDOUT[:-1], tmp_path),
    ]
    assert len({first.folder, *(other.folder for other in others)}) == 5
    monkeypatch.setattr(module, "_make", lambda *args: pytest.fail("made again"))
    assert warm_start(TINY, ENTRIES, HELDOUT, tmp_path) == first


def test_warm_start_is_deterministic(tmp_path: Path) -> None:
    one, two = (warm_start(TINY, ENTRIES, HELDOUT, tmp_path / name).folder / "model.safetensors" for name in "ab")
    assert one.read_bytes() == two.read_bytes()


def test_failed_warm_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        warm_start(TINY, ENTRIES, HELDOUT, tmp_path)
    assert os.listdir(tmp_path) == []


def test_concurrent_warm_starts_both_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = module._make

    def make_and_be_overtaken(config: WarmStartConfig, *rest: Any) -> None:
        monkeypatch.setattr(module, "_make", make)
        warm_start(TINY, ENTRIES, HELDOUT, tmp_path)  # the other process, done first
        *data, folder, report = rest
        make(config, *data, folder.with_name(".own"), report)
        (tmp_path / ".own").rename(folder)

    monkeypatch.setattr(module, "_make", make_and_be_overtaken)
    made = warm_start(TINY, ENTRIES, HELDOUT, tmp_path)
    assert os.listdir(tmp_path) == [made.folder.name]


def test_warm_start_rejects_unusable_questions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 questions to learn from"):
        warm_start(TINY, HELDOUT, HELDOUT, tmp_path)
    with pytest.raises(ValueError, match="0 questions to learn from"):
        warm_start(TINY, [], HELDOUT, tmp_path)
    assert TRACES.keys() == PHRASES.keys()  # by which a run is checked before it starts
    with pytest.raises(ValueError, match="no worked answers for task 'leg_counting'"):
        warm_start(replace(TINY, model=replace(MODEL, task="leg_counting")), ENTRIES, HELDOUT, tmp_path)
    assert os.listdir(tmp_path) == []


def test_heldout_questions_are_excluded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learnt: list[str] = []

    def listen(tokenizer: Any, entries: Any, answers: Any) -> list[Example]:
        learnt.extend(entry["question"] for entry in entries)
        return examples(tokenizer, entries, answers)

    examples = module._examples
    monkeypatch.setattr(module, "_examples", listen)
    made = warm_start(TINY, [HELDOUT[0], *ENTRIES, HELDOUT[3]], HELDOUT, tmp_path)
    assert set(learnt) == {entry["question"] for entry in ENTRIES}
    assert warm_start(TINY, ENTRIES, HELDOUT, tmp_path) == made


def test_read_warm_start_rejects_an_invalid_record(tmp_path: Path) -> None:
    (tmp_path / RECORD_FILE).write_text(json.dumps({"curve": [{"step": 1}]}))
    with pytest.raises(ValueError, match="not the record of a warm start"):
        read_warm_start(tmp_path)


def test_imitate_without_examples_is_an_error() -> None:
    model, _ = build_demo_model(DemoModelConfig(hidden_size=16, layers=1, heads=2, kv_heads=1, mlp_size=16))
    with pytest.raises(ValueError, match="no examples to imitate"):
        imitate(model, [], steps=1, batch=1, rates=LearningRates(1e-3, 1e-3), warmup=1, seed=0)


def test_imitate_learns_its_examples() -> None:
    """Muon and AdamW together memorise eight answers."""
    model, _ = build_demo_model(MODEL)
    source = random.Random(0)
    examples = [Example([10 + i, 30 + i], [*source.choices(range(50, 60), k=3), 1]) for i in range(8)]
    losses: list[float] = []
    imitate(
        model,
        examples,
        steps=150,
        batch=4,
        rates=LearningRates(1e-2, 1e-2),
        warmup=5,
        seed=0,
        after=lambda step, loss: losses.append(loss),
    )
    assert len(losses) == 150
    assert losses[0] > 4
    assert losses[-1] < 0.2
    model.set_attn_implementation("sdpa")
    answers = generate(model, [example.prompt for example in examples], max_new_tokens=5, stop_token_id=1)
    assert answers == [example.answer[:-1] for example in examples]


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 0.2), (4, 0.96), (5, 0.95), (50, 0.5), (99, 0.01)], ids=lambda value: str(value)
)
def test_learning_rates_rise_and_fall(step: int, expected: float) -> None:
    assert scheduled(step, 100, 5) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("slip_rate", 1.5),
        ("careless_share", 1.1),
        ("habit_share", -0.1),
        ("steps", 0),
        ("batch", 0),
        ("measured", 0),
        ("measure_every", 0),
        ("learning_rate", 0.0),
        ("matrix_learning_rate", -1.0),
        ("habit_learning_rate", float("nan")),
        ("habit_steps", -1),
        ("warmup", -1),
    ],
)
def test_config_names_an_invalid_field(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        replace(TINY, **{field: value})


def test_config_does_not_import_torch() -> None:
    code = "import sys, operators.trainer.warm_start_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
