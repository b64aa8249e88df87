"""Beam options: the defaults of each runner, overridden by the user's options."""

from __future__ import annotations

import copy

import pytest
from apache_beam.options.pipeline_options import DebugOptions, PipelineOptions, PortableOptions, StandardOptions

from infra.runners.options import RUNNERS, option_names, pipeline_options
from infra.runners.run import FlinkJobOptions
from operators.io.poll_range import slice_seconds


@pytest.mark.parametrize("runner", RUNNERS)
def test_beam_parses_the_default_options(runner: str) -> None:
    options = PipelineOptions(pipeline_options(runner))  # type: ignore[arg-type]
    named = {"embedded": "FnApiRunner", "prism": "PrismRunner", "flink": "FlinkRunner", "portable": "PortableRunner"}
    assert options.view_as(StandardOptions).runner == named[runner]
    portable = options.view_as(PortableOptions)
    if runner == "embedded":
        assert not options.view_as(StandardOptions).streaming
    else:
        assert options.view_as(StandardOptions).streaming
        assert portable.environment_type == "LOOPBACK"
        assert portable.job_server_timeout > 365 * 24 * 3600  # a run never reaches it
        assert options.view_as(DebugOptions).lookup_experiment("disable_logging_submission_environment")


def test_views_of_options_are_kept_until_a_copy() -> None:
    options = FlinkJobOptions(pipeline_options("embedded"))
    view = options.view_as(StandardOptions)
    assert options.view_as(StandardOptions) is view
    copied = copy.deepcopy(options)  # as Beam's pipelines do
    copied.view_as(StandardOptions).streaming = True
    assert copied.view_as(StandardOptions).streaming
    assert not view.streaming


def test_flink_options_set_checkpoints_and_small_bundles() -> None:
    options = pipeline_options("flink")
    assert {"--checkpointing_interval=1000", "--max_bundle_time_mills=20", "--max_bundle_size=100"} <= set(options)


@pytest.mark.parametrize("runner", RUNNERS)
def test_beam_has_every_default_option(runner: str, caplog: pytest.LogCaptureFixture) -> None:
    """Beam warns of an option that it does not know as if the job server did not get it."""
    caplog.set_level("WARNING", logger="apache_beam")  # a role in the same process has made it quiet
    options = pipeline_options(runner)  # type: ignore[arg-type]
    FlinkJobOptions(options).get_all_options(display_warnings=True)
    assert not caplog.messages
    FlinkJobOptions([*options, "--unknown_to_all=1"]).get_all_options(display_warnings=True)
    assert "--unknown_to_all=1" in caplog.text


@pytest.mark.parametrize(
    "extra",
    [
        ["--checkpointing_interval=9", "--runner=Mine"],
        ["--checkpointing_interval", "9", "--runner", "Mine"],
        ["--checkpointing-interval=9", "--runner=Mine"],
    ],
)
def test_user_options_replace_the_defaults(extra: list[str]) -> None:
    options = pipeline_options("flink", extra)
    assert options[-len(extra) :] == extra
    ours = options[: -len(extra)]
    assert not option_names(ours) & {"checkpointing_interval", "runner"}
    assert "max_bundle_size" in option_names(ours)


def test_user_option_can_disable_a_default_flag() -> None:
    assert "--streaming" not in pipeline_options("prism", ["--no_streaming"])


def test_pipeline_options_raises_for_an_unknown_runner() -> None:
    with pytest.raises(ValueError, match="'spark' must be one of embedded, prism, flink, portable"):
        pipeline_options("spark")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("runner", "seconds"), [("FnApiRunner", 600.0), ("PrismRunner", 5.0), ("FlinkRunner", 0.2), ("PortableRunner", 0.2)]
)
def test_slice_seconds_depends_on_the_runner(runner: str, seconds: float) -> None:
    assert slice_seconds(runner) == seconds
