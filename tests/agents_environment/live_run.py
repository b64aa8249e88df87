"""Starts a run that hands out its episodes, and the tests of real clients against it: `make agents-test`.

    python tests/agents_environment/live_run.py PYTEST [ARGUMENT]…

The run trains a small model for as long as the tests need; then it is stopped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "agents.toml"
START_S, STOP_S = 600.0, 120.0
SETTINGS = (
    'agents.function=""',
    "agents.timeout_s=120",
    "warm_start.steps=150",
    "trainer.optimizer_steps=100000",
    "gateway.branches=all",
    "gateway.serve_requests=4",
    "prompts.max_new_tokens=256",
    "evaluation.every=0",
    "prompts.heldout=8",
)


def main(command: list[str]) -> int:
    """Run `command` with the variables of the live run; returns its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        sets = [argument for setting in SETTINGS for argument in ("--set", setting)]
        laminar = [sys.executable, "-W", "ignore", "-c", "from pipelines.cli.main import main; main()"]
        output = Path(folder, "output.txt")
        with output.open("w") as log:
            run = subprocess.Popen(
                [*laminar, "run", str(EXAMPLE), "--name", "live", *sets],
                cwd=folder,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
            )
        try:
            served = _access(laminar, Path(folder), run, output)
            variables = {name.upper(): str(value) for name, value in served.items()}
            return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode
        finally:
            run.send_signal(signal.SIGINT)
            try:
                run.wait(STOP_S)
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()


def _access(laminar: list[str], folder: Path, run: subprocess.Popen[bytes], output: Path) -> dict[str, str]:
    """The address and the keys of the run, once its gateway has started. Raises RuntimeError."""
    deadline = time.monotonic() + START_S
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    while time.monotonic() < deadline and run.poll() is None:
        if list(folder.glob("runs/live/gateway.json")):
            shown = subprocess.run(
                [*laminar, "agents", "serve", "--json"], cwd=folder, env=environment, capture_output=True, check=False
            )
            if shown.returncode == 0:
                return dict(json.loads(shown.stdout))
        time.sleep(1.0)
    raise RuntimeError(f"the run has not started: {output.read_text()[-2000:]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
