"""One role of benchmarks/gateway.py: `python -m benchmarks.gateway_roles CONFIG placement|rollout|gateway`.

The roles are those of every run, but rollouts have emulated engines, although agents need text: the gateway decodes the
synthetic tokens with the model's tokenizer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pipelines.rollout
from infra.runners.role_logging import configure_logging
from operators.rollout.backend import BackendSpec, EmulatedSpec
from pipelines.config import Config, load_config
from pipelines.roles import run_process, submitted_process


def _emulated(config: Config, process: int) -> BackendSpec:
    return EmulatedSpec(config.rollout, config.run.time_scale, config.relay.keep_versions)


if __name__ == "__main__":
    configure_logging()
    pipelines.rollout._backend = _emulated
    config = load_config(Path(sys.argv[1]))
    run_process(config, submitted_process(config, sys.argv[2]))
