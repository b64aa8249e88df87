"""`laminar watch` and `laminar metrics serve` on a run that is known by its Kafka alone."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable

from infra.kafka.properties import ClientProperties

RUN = "a-run-to-read"
Laminar = Callable[..., tuple[int, str, str]]


def test_watch_prints_a_snapshot_without_a_terminal(laminar: Laminar) -> None:
    told = json.loads(laminar("watch", "--json")[1])
    assert (told["optimizer_steps"], told["reward"], told["trajectories_trained"]) == (2, 0.5, 3)
    assert (told["weight_version"], told["weight_versions"]) == ("2.2", 4)
    assert told["replicas"]["0"]["running"] == 8
    shown = laminar("watch")[1]
    assert RUN in shown
    assert "0.50 now" in shown


def test_metrics_serve_exposes_a_run_to_prometheus(story: ClientProperties) -> None:
    words = ["metrics", "serve", "--port", "0", "--run", RUN, "-b", story.bootstrap_servers]
    code = f"from pipelines.cli.main import main; main({words!r})"
    serving = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert serving.stderr is not None
    try:
        said = next(line for line in serving.stderr if "http://" in line)
        found = re.search(r"http://\S+", said)
        assert found is not None
        with urllib.request.urlopen(found[0], timeout=60) as answer:
            text = answer.read().decode()
        assert f'laminar_trainer_reward_mean{{run="{RUN}"}} 0.5' in text
        serving.send_signal(signal.SIGINT)
        assert serving.wait(60) == 130
    finally:
        serving.kill()
        serving.stderr.close()
        serving.wait()
