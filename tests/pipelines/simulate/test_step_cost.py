"""`laminar cost`: GPU hours, bytes in Kafka and prices of a step."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
from predicted_clusters import TABLE, small_cluster, small_config

from operators.rollout.emulation_config import RooflineConfig
from operators.trainer.emulation import TrainerEmulation
from pipelines.cli.cost import cost
from pipelines.config import ConfigError, load_config, save_config
from pipelines.present.prediction import cost_lines
from pipelines.simulate.prediction import assumptions
from pipelines.simulate.prediction.cost import ResourcePrices, cost_of
from pipelines.simulate.prediction.log_bytes import TENSORS, StepShape, log_bytes
from pipelines.simulate.prediction.measurement import Prediction
from schemas.topics import CATALOGUE

SETUPS = sorted((Path(__file__).parents[3] / "examples" / "setups").glob("*.toml"))
STEP = StepShape(
    trajectories=64,
    samples_per_prompt=8,
    prompt_tokens=200,
    response_tokens=1000,
    micro_batch_tokens=12_000,
    progress_tokens=512,
    rollouts=2,
    seconds=10.0,
)


def predicted(iteration_s: float = 90.0) -> Prediction:
    """A step of 32 trajectories of 16 prompt and 100 response tokens."""
    return Prediction(900, 32 * 116 / iteration_s, 1, iteration_s, 0.5, 1, 1, 2, (1.0,), 0.1, 0.1, 0.1, 0, 320, 1)


def test_log_bytes_name_topics_of_the_catalogue() -> None:
    assert log_bytes(STEP).keys() <= CATALOGUE.keys()


def test_counted_topics_are_those_of_the_docs() -> None:
    text = (Path(__file__).parents[3] / "docs" / "prediction.md").read_text(encoding="utf-8")
    counted = re.search(r"the topics that are counted:\n(.*?)\.\n", text)
    assert counted is not None
    assert set(re.findall(r"`([a-z-]+)`", counted[1])) == log_bytes(STEP).keys()


@pytest.mark.parametrize(
    ("topic", "per_trajectory"),
    [("trajectories", 12.0), ("experiences", 12.0), ("batches", 8.0), ("progress", 9.0), ("inbox", 0.0)],
)
def test_log_bytes_grow_with_tokens_as_documented(topic: str, per_trajectory: float) -> None:
    longer = replace(STEP, response_tokens=STEP.response_tokens + 1024, micro_batch_tokens=22_240)
    gained = (log_bytes(longer)[topic] - log_bytes(STEP)[topic]) / STEP.trajectories / 1024
    assert gained == pytest.approx(per_trajectory, abs=2.5 if topic == "progress" else 0.3)


@pytest.mark.parametrize(
    ("topic", "records", "size"),
    [
        ("prompts", 8, 1_710 + 8 * 200),
        ("inbox", 64, 3_370 + 8 * 200),
        ("trajectories", 64, 3_590 + 8 * 200 + 12 * 1000),
        ("experiences", 64, 4_040 + 8 * 200 + 12 * 1000),
        ("batches", 64, 200 + 8 * (200 + 1000)),
        ("settled", 64, 70),
        ("relay", 1, 430 + 90 * TENSORS),
    ],
)
def test_log_bytes_are_those_of_the_docs(topic: str, records: int, size: int) -> None:
    """The table of sizes in docs/topics.md."""
    assert log_bytes(STEP)[topic] / records == pytest.approx(size, rel=0.1)


def test_log_bytes_of_a_version_grow_with_its_chunks() -> None:
    many = log_bytes(replace(STEP, chunks=2000))["relay"]
    assert many - log_bytes(STEP)["relay"] == pytest.approx(2000 * 11, rel=0.1)


def test_cost_of_a_step_counts_all_gpus_and_copies() -> None:
    found = cost_of(small_cluster(), predicted(), ResourcePrices(gpu_hour=2.0, kafka_gb=0.1), copies=2)
    assert (found.train_gpu_hours, found.rollout_gpu_hours) == (pytest.approx(0.1), pytest.approx(0.1))
    assert (found.prompt_tokens, found.response_tokens) == (16, 100)
    assert found.written_bytes == 2 * sum(found.log_bytes.values())
    assert found.price == pytest.approx(0.4 + 0.1 * found.written_bytes / 1e9)
    day = found.to_json()["day"]
    assert (day["steps"], day["gpu_hours"]) == (pytest.approx(960), pytest.approx(192))


def test_cost_without_prices_has_none() -> None:
    found = cost_of(small_cluster(), predicted(), ResourcePrices())
    assert found.price is None
    assert not [line for line in cost_lines(small_cluster(), found) if "price" in line]
    assert [line for line in cost_lines(small_cluster(), found) if "trajectories of 16 prompt and 100 response" in line]


def test_cost_command_predicts_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    save_config(small_config(), file)
    data = cost(file, train_gpus=4, gpu_hour=2.0, copies=1, json=True).data
    assert data["gpu_price"] == pytest.approx(2.0 * data["gpu_hours"])
    assert data["written_bytes"] == sum(data["log_bytes"].values())


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.stem)
def test_cost_command_takes_each_setup(setup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assumptions, "STEPS", 3)
    config, report = load_config(setup), cost(setup, gpu_hour=2.0, json=True)
    data, rollout = report.data, config.rollout
    found = data["train_gpus"], data["replicas"], data["gpus_per_replica"]
    assert found == (config.trainer.ranks, rollout.total_replicas, rollout.tensor_parallel)
    gpus = config.trainer.ranks + rollout.total_replicas * rollout.tensor_parallel
    assert data["gpu_price"] == pytest.approx(2.0 * gpus * data["seconds"] / 3600)
    text = " ".join(data["assumed"])
    for each in (Path(config.model.path).name, "built-in table of Qwen2.5-32B on 4 H800", "768 tokens at the median"):
        assert each in text


def test_assumed_decode_steps_of_the_table_are_its_own() -> None:
    config = load_config(SETUPS[0])
    size = assumptions.model_size(config)
    assert (SETUPS[0].stem, size is not None) == ("qwen2.5-32b", True)
    found, expected = assumptions.roofline_of(size, 4), RooflineConfig()  # type: ignore[arg-type]
    assert [ms for _, ms in found.decode_ms] == pytest.approx([ms for _, ms in expected.decode_ms], rel=0.01)
    assert (found.kv_ns, found.prefill_us) == pytest.approx((expected.kv_ns, expected.prefill_us), rel=0.01)
    trainer = assumptions.trainer_of(size, 16)  # type: ignore[arg-type]
    assert trainer.seconds(1e6) == pytest.approx(TrainerEmulation().seconds(1e6), rel=0.01)


def real_config(folder: Path) -> Path:
    """The cluster of `small_config` with a real engine, whose model is not here."""
    file = folder / "run.toml"
    table = {**TABLE, "rollout": {"engine": "vllm", "replicas": 4, "slots": 16, "context": 1024}}
    del table["trainer"]
    file.write_text(tomli_w.dumps(table | {"model": {"path": "model"}}))
    return file


def test_cost_of_a_real_engine_by_a_table(tmp_path: Path) -> None:
    emulated = tmp_path / "table.toml"
    strided = {"stride": 2, "lengths": {"p50": 100, "p99": 500}}
    save_config(small_config(rollout__emulation=strided), emulated)
    report = cost(real_config(tmp_path), emulation=emulated, prompt_tokens=16, json=True)
    text = " ".join(report.data["assumed"])
    assert f"the times of {emulated}, as they are" in text
    assert "200 tokens at the median, 1,000 at the 99th percentile" in text
    assert report.data["prompt_tokens"] == 16
    strided["lengths"] = {"p50": 1000, "p99": 8000}  # in real tokens the default's
    save_config(small_config(rollout__emulation=strided), emulated)
    assert "2,000 tokens at the median" in str(cost(real_config(tmp_path), emulation=emulated, json=True).data)
    own = cost(real_config(tmp_path), emulation=emulated, prompt_tokens=16, p50=20.0, p99=50.0, json=True).data
    assert own["response_tokens"] < report.data["response_tokens"]
    assert own["seconds"] < report.data["seconds"]


def test_cost_command_refuses_a_model_without_a_size(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the size of the model .*model.* is not known here: .*--emulation FILE"):
        cost(real_config(tmp_path))


def test_cost_command_refuses_assumptions_of_an_emulated_run(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    save_config(small_config(), file)
    with pytest.raises(ConfigError, match="for runs with a real engine"):
        cost(file, p50=100.0)
    with pytest.raises(ConfigError, match=r"rollout\.engine is 'vllm', not 'emulated'"):
        cost(real_config(tmp_path), emulation=real_config(tmp_path))
