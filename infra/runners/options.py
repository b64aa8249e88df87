"""What each Beam runner must be told for endless pipelines of small bundles; users' own Beam options win.

Measured reasons: a portable job server ends its client's streams after 300 s unless told otherwise; Flink holds
elements back for 1 s and restores nothing without a checkpointing interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

Runner = Literal["embedded", "prism", "flink", "portable"]
RUNNERS: tuple[Runner, ...] = get_args(Runner)

_TEN_YEARS_S = "315360000"
# LOOPBACK: the steps run in the process that submits, so its signals reach them; a cluster's user chooses another.
_PORTABLE = {"streaming": "", "environment_type": "LOOPBACK", "job_server_timeout": _TEN_YEARS_S}
_DEFAULTS: Mapping[Runner, Mapping[str, str]] = {
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


def pipeline_options(runner: Runner, extra: Sequence[str] = ()) -> list[str]:
    """Beam's options for `runner`: our defaults, less those that `extra` names, then `extra`.

    Raises ValueError for a runner that is none of `RUNNERS`.
    """
    if runner not in _DEFAULTS:
        raise ValueError(f"runner {runner!r} is none of {', '.join(RUNNERS)}")
    named = option_names(extra)
    defaults = [
        f"--{name}={value}" if value else f"--{name}" for name, value in _DEFAULTS[runner].items() if name not in named
    ]
    return [*defaults, *extra]


def option_names(options: Sequence[str]) -> set[str]:
    """The names that options give a value to; `--no_x` and `--x` both name x."""
    names = {option[2:].partition("=")[0].replace("-", "_") for option in options if option.startswith("--")}
    return names | {name.removeprefix("no_") for name in names}
