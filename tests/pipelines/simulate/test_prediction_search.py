"""The search for clusters, the calibration from a run, and `laminar simulate CONFIG`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from predicted_clusters import question, small_cluster, small_config
from typer.testing import CliRunner

from pipelines.cli import cost as cost_module
from pipelines.cli import simulate as simulate_module
from pipelines.cli.predict import predict_report
from pipelines.cli.simulate import simulate
from pipelines.config import ConfigError, save_config
from pipelines.present.prediction import candidates_plot, candidates_table
from pipelines.simulate.prediction.cluster import Cluster
from pipelines.simulate.prediction.machines import Memory, kv_gigabytes, memory_of
from pipelines.simulate.prediction.measurement import Prediction
from pipelines.simulate.prediction.search import recommended, search, splits, tensor_parallel, with_trainer


def fake(cluster: Cluster) -> Prediction:
    """A prediction by formula: best with half of the GPUs for the trainer; staler with a higher bound."""
    share, bound = cluster.train_gpus / cluster.gpus, cluster.config.experience.max_staleness
    rate = 1000.0 * (1 - abs(share - 0.5)) + min(bound, 2)
    return Prediction(1, rate, rate, 1, 0.5, 1, bound / 2, bound, (1.0,), 0.1, 0.1, 0.1, 0, 1, 1 / rate)


def test_search_recommends_the_best_split_of_lowest_staleness() -> None:
    cluster = with_trainer(small_cluster(), 2)
    found = list(search(replace(cluster, config=small_config(rollout__replicas=6)), predict=fake))
    best = recommended(found)
    assert (best.cluster.train_gpus, best.cluster.replicas) == (4, 4)
    assert best.cluster.config.experience.max_staleness == 1
    assert {each.kind for each in found} == {"present", "split", "staleness"}


def test_search_only_names_autoscaling_as_not_predicted() -> None:
    cluster = small_cluster(rollout__replicas=2, autoscaling__maximum=2, placement__max_replicas=4)
    found = list(search(cluster, predict=fake))
    assert max(each.cluster.replicas for each in found) == 4
    assert {"".join(each.cluster.not_predicted) for each in found} == {"autoscaling"}


def test_search_tries_no_staleness_bound_that_paces_nothing() -> None:
    cluster = small_cluster(placement__schedule="one_step", placement__max_replicas=16)
    assert {each.kind for each in search(cluster, predict=fake)} == {"present", "split"}


def test_search_begins_with_replicas_that_hold_the_weights() -> None:
    cluster = replace(small_cluster(), train_gpus=28)
    found = list(search(cluster, memory=Memory("H800", 100.0), predict=fake))  # 72 GB of one are too few
    assert "use more GPUs a replica" in found[0].error
    assert {each.cluster.gpus_per_replica for each in found if each.prediction} == {2, 4}
    assert {each.cluster.gpus for each in found} == {32}
    assert recommended(found).cluster.train_gpus == 16


def test_search_that_finds_nothing_names_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    save_config(small_config(), file)
    asked = question(file, machine="L40S", weights_gb=400.0)
    with pytest.raises(ConfigError, match="no candidate can run: weights of 400 GB do not fit on 1 x L40S"):
        predict_report(asked, search=True, plot=None, json=False)


def test_search_predicts_every_kind_of_candidate() -> None:
    cluster = replace(small_cluster(trainer__optimizer_steps=4), train_gpus=4)
    found = list(search(cluster, memory=Memory("H800", 15.0)))
    assert {each.kind for each in found if each.prediction} == {"present", "split", "staleness", "tensor parallelism"}
    assert not [each.error for each in found if each.error]


def test_search_goes_on_past_a_cluster_that_cannot_run() -> None:
    def failing(cluster: Cluster) -> Prediction:
        if cluster.train_gpus == 2:
            raise ValueError("too slow")
        return fake(cluster)

    found = list(search(small_cluster(), predict=failing))
    assert [each.error for each in found if each.prediction is None] == ["too slow"]
    with pytest.raises(ValueError, match="too slow"):
        recommended([each for each in found if each.error])


def test_splits_use_all_gpus_in_whole_replicas() -> None:
    cluster = replace(small_cluster(), train_gpus=16, gpus_per_replica=4)
    assert {each.gpus for each in splits(cluster)} == {32}
    assert [each.replicas for each in splits(cluster)] == [6, 5, 4, 3, 2]


def test_a_larger_trainer_is_faster_but_not_in_proportion() -> None:
    cluster = small_cluster()
    before, after = (each.config.trainer.emulation for each in (cluster, with_trainer(cluster, 8)))
    assert before.seconds(0) == after.seconds(0)
    gain = (before.seconds(1e4) - 1) / (after.seconds(1e4) - 1)
    assert gain == pytest.approx(2**0.793)


def test_tensor_parallel_leaves_out_what_does_not_fit() -> None:
    cluster = replace(small_cluster(), gpus_per_replica=4)
    found = list(tensor_parallel(cluster, Memory("H800", 150.0)))
    assert [(each.gpus_per_replica, each.replicas) for each in found] == [(8, 2)]  # two of 80 GB are too small
    assert found[0].config.rollout.kv_capacity == int(4096 * (576 - 150) / (288 - 150))
    roofline = found[0].config.rollout.emulation.roofline
    assert roofline.decode_ms[0][1] == pytest.approx(10.7 * 0.75)


def test_tensor_parallel_keeps_all_gpus() -> None:
    cluster = replace(small_cluster(), config=small_config(rollout__replicas=5), gpus_per_replica=4)
    found = list(tensor_parallel(cluster, Memory("H800", 15.0)))
    assert [(each.gpus_per_replica, each.replicas) for each in found] == [(2, 10), (8, 2)]
    assert {each.gpus for each in found} == {cluster.gpus}
    colocated = tensor_parallel(replace(cluster, colocated=True), Memory("H800", 15.0))
    assert [each.gpus_per_replica for each in colocated] == [2]


def test_search_refuses_a_trainer_that_cannot_hold_the_model() -> None:
    cluster = replace(small_cluster(), train_gpus=16, gpus_per_replica=4)
    found = list(search(cluster, memory=Memory("H800", 80.0), predict=fake))
    refused = {each.cluster.train_gpus for each in found if "give the trainer more GPUs" in each.error}
    assert refused == {8}  # 640 GB need nine H800
    assert recommended(found).cluster.train_gpus > 8


def test_machines_reject_unknown_names_and_too_large_models() -> None:
    with pytest.raises(ValueError, match=r"there is no machine 'H80O'.*known: A100-40"):
        memory_of("H80O")
    with pytest.raises(ValueError, match="weights of 145 GB do not fit on 2 x H800, which have 144 GB"):
        kv_gigabytes("H800", 2, 145)


def test_plot_shows_each_kind_of_candidate() -> None:
    drawn = ElementTree.fromstring(candidates_plot(list(search(small_cluster(), predict=fake))))
    texts = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"split", "staleness", "the trainer's share of the GPUs"} <= set(texts)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"machine": "H80", "weights_gb": 1.0}, "there is no machine 'H80'"),
        ({"machine": "H800", "weights_gb": 145.0}, "do not fit on 1 x H800"),
        ({"weights_gb": 15.0}, "--weights-gb alone checks nothing: give --machine and"),
        ({"machine": "H800"}, "--machine alone checks nothing"),
        ({"machine": "H800", "weights_gb": 40.0}, "takes 320 GB .* do not fit on 4 x H800 with 288 GB"),
        (
            {"machine": "H800", "weights_gb": 15.0, "kv_kb": 57_000.0},
            "KV of 4,096 tokens takes 233 GB, but 57 GB are left .* set rollout.kv_capacity to at most 1,000",
        ),
        (
            {"changes": ["rollout.engine=transformers"]},
            r"only emulated runs are predicted.* in place of the configuration: --calibrate runs/NAME$",
        ),
        (
            {"changes": ["rollout.engine=transformers", "prompts={task='gcd', environment='guess'}"]},
            r"\. Turns and waits of environments \(guess\) are not predicted$",
        ),
        ({"changes": ["rollout.emulation.lengths={file = '/nonexistent'}"]}, "cannot read the lengths"),
        ({"changes": ["rollout.emulation.lengths={p50 = 0}"]}, "p50 must be at least 1, not 0"),
        ({"run": Path("runs/none")}, "leave out CONFIG.toml"),
    ],
)
def test_prediction_rejects_a_bad_question(tmp_path: Path, changes: dict[str, object], error: str) -> None:
    file = tmp_path / "run.toml"
    save_config(small_config(), file)
    with pytest.raises(ConfigError, match=error):
        predict_report(question(file, **changes), search=False, plot=None, json=False)


@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize("commands", [simulate_module.app, cost_module.app])
def test_commands_refuse_numbers_that_are_not_finite(commands: Any, number: str) -> None:
    done = CliRunner().invoke(commands, ["run.toml", "--weights-gb", number])
    assert (done.exit_code, "Invalid value for '--weights-gb'" in done.output) == (2, True)


HISTORY_OPTIONS = (
    ("--explore", "3"),
    ("--seed", "1"),
    ("--shape", "plain"),
    ("--replay", "failing.json"),
    ("--timeline",),
    ("--until", "3"),
    ("--step", "1"),
    ("--perfetto", "trace.json"),
    ("--save", "failing.json"),
)
PREDICTION_OPTIONS = (
    ("--set", "rollout.slots=64"),
    ("--search",),
    ("--train-gpus", "2"),
    ("--replica-gpus", "2"),
    ("--machine", "H80O"),
    ("--weights-gb", "1"),
    ("--kv-kb", "1"),
    ("--gpu-hour", "2"),
    ("--plot", "splits.svg"),
)


@pytest.mark.parametrize(
    ("arguments", "options", "change"),
    [
        (("run.toml",), HISTORY_OPTIONS, "leave out CONFIG.toml or"),
        (("--calibrate", "runs/first"), HISTORY_OPTIONS, "leave out CONFIG.toml or"),
        ((), PREDICTION_OPTIONS, "add CONFIG.toml or"),
    ],
)
def test_simulate_rejects_options_of_its_other_use(
    arguments: tuple[str, ...], options: tuple[tuple[str, ...], ...], change: str
) -> None:
    for option in options:
        done = CliRunner().invoke(simulate_module.app, [*arguments, *option])
        assert (done.exit_code, f"Invalid value for {option[0]}" in done.output.replace("'", "")) == (2, True), option
        assert change in done.output


def test_replay_rejects_a_seed_and_a_shape() -> None:
    for option in (("--seed", "3"), ("--shape", "plain")):
        done = CliRunner().invoke(simulate_module.app, ["--replay", "failing.json", *option])
        assert (done.exit_code, "its history has a seed and a shape" in done.output) == (2, True), option


def test_prediction_names_settings_without_effect(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    save_config(small_config(experience__over_age="wait", autoscaling__minimum=1, trainer__optimizer_steps=4), file)
    report = simulate(file, train_gpus=4)
    assert report.data["not_predicted"] == ["experience.over_age", "autoscaling"]
    ignored = "Not predicted: the effect of experience.over_age, autoscaling"
    assert ignored in report.text()
    assert ignored in cost_module.cost(file).text()
    found = list(search(question(file).cluster(), predict=fake))
    assert candidates_table(found, found[0], 0.0).caption == ignored


def test_simulate_command_predicts_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    save_config(small_config(trainer__optimizer_steps=4), file)
    found = simulate(file, train_gpus=4, gpu_hour=2.0, json=True).data
    assert found["trained_tokens_per_s"] > 0
    assert found["cost_per_billion_tokens"] == pytest.approx(2 * found["gpu_hours_per_billion_tokens"])
