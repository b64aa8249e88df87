"""One audit of an active run, in a process of low priority.

`python -m pipelines.inspect.audit.background_process CONFIG OUT`
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from infra.files import write_atomically
from pipelines.config import load_config
from pipelines.inspect.audit.audit_run import audit

LOWEST_PRIORITY = 19


def main() -> None:
    """Audit the run of the configuration file CONFIG and write the result to the file OUT as JSON."""
    config_file, out = map(Path, sys.argv[1:])
    os.nice(LOWEST_PRIORITY)
    config = load_config(config_file)
    timeout_s = config.kafka.transaction_timeout_s
    found = audit(config.kafka.client(), config.run.name, transaction_timeout_s=timeout_s)
    write_atomically(out, json.dumps(found.to_json()))


if __name__ == "__main__":
    main()
