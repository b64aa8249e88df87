"""One audit of a run at work, as a process of low priority: `python -m pipelines.audit.in_background CONFIG OUT`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from infra.files import write_atomically
from pipelines.audit.audit_run import audit
from pipelines.config import load_config

LOWEST_PRIORITY = 19


def main() -> None:
    """Audit the run of the configuration CONFIG and write what was found to OUT, as JSON."""
    config_file, out = map(Path, sys.argv[1:])
    os.nice(LOWEST_PRIORITY)
    config = load_config(config_file)
    write_atomically(out, json.dumps(audit(config.kafka.client(), config.run.name).to_json()))


if __name__ == "__main__":
    main()
