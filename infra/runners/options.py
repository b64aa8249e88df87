"""Default Beam options of each runner for unbounded pipelines of small bundles; the user's own options take precedence.

Reasons, measured: a portable job server ends its client's streams after 300 s by default; Flink delays elements by 1 s
and restores nothing without a checkpointing interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

RunnerName = Literal["embedded", "prism", "flink", "portable"]
RUNNERS: tuple[RunnerName, ...] = get_args(RunnerName)
ALLOW_UNTESTED = "LAMINAR_ALLOW_UNTESTED_FLINK"
"""Environment variable: if it is set, an untested pair of Beam and Flink is a warning instead of an error."""
FLINK_VERSION_UNUSED = (
    "--flink_version has no effect: a job server is of one version of Flink. Leave it out; for a cluster of another "
    f"version than Laminar's pass --job_endpoint=HOST:PORT or --flink_job_server_jar=FILE, with {ALLOW_UNTESTED}=1"
)
"""Beam reads that option only where it downloads a job server itself."""

_TEN_YEARS_S = "315360000"
# LOOPBACK: the steps run in the submitting process and receive its signals; for a cluster the user sets another type.
_PORTABLE = {
    "streaming": "",
    "environment_type": "LOOPBACK",
    "job_server_timeout": _TEN_YEARS_S,
    # Otherwise each submission runs `pip freeze` and leaves its output in the temporary folder.
    "experiments": "disable_logging_submission_environment",
}
_DEFAULTS: Mapping[RunnerName, Mapping[str, str]] = {
    "embedded": {"runner": "FnApiRunner"},
    "prism": {"runner": "PrismRunner", **_PORTABLE},
    "flink": {
        "runner": "FlinkRunner",
        **_PORTABLE,
        "checkpointing_interval": "1000",
        "max_bundle_time_mills": "20",
        "max_bundle_size": "100",
        "number_of_execution_retries": "3",
    },
    "portable": {"runner": "PortableRunner", **_PORTABLE},
}


def pipeline_options(runner: RunnerName, extra: Sequence[str] = ()) -> list[str]:
    """The Beam options for `runner`: the defaults without those that `extra` sets, then `extra`.

    Raises ValueError for a runner that is not in `RUNNERS`.
    """
    if runner not in _DEFAULTS:
        raise ValueError(f"runner {runner!r} must be one of {', '.join(RUNNERS)}")
    user_named = option_names(extra)
    defaults = [
        f"--{name}={value}" if value else f"--{name}"
        for name, value in _DEFAULTS[runner].items()
        if name not in user_named
    ]
    return [*defaults, *extra]


def option_names(options: Sequence[str]) -> set[str]:
    """The names of the options that are set; `--no_x` and `--x` both set x."""
    names = {option[2:].partition("=")[0].replace("-", "_") for option in options if option.startswith("--")}
    return names | {name.removeprefix("no_") for name in names}
