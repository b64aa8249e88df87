"""`laminar watch` and `laminar metrics serve` on a run without a local folder."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from infra.kafka.properties import ClientProperties

RUN = "example-run"
Laminar = Callable[..., tuple[int, str, str]]


def test_watch_prints_a_snapshot_without_a_terminal(laminar: Laminar) -> None:
    snapshot = json.loads(laminar("watch", "--json")[1])
    assert (snapshot["optimizer_steps"], snapshot["reward"], snapshot["trajectories_trained"]) == (2, 0.5, 3)
    assert (snapshot["weight_version"], snapshot["weight_versions"]) == ("2.2", 3)
    assert snapshot["replicas"]["0"]["running"] == 8
    shown = laminar("watch")[1]
    assert RUN in shown
    assert "0.50 now" in shown


def test_metrics_serve_exposes_a_run_to_prometheus(log_client: ClientProperties, tmp_path: Path) -> None:
    started = time.time()
    arguments = ["metrics", "serve", "--port", "0", "--run", RUN, "-b", log_client.bootstrap_servers]
    arguments += ["--audit-every", "0.1"]
    code = f"from pipelines.cli.main import main; main({arguments!r})"
    places = {**os.environ, "TMPDIR": str(tmp_path)}
    (tmp_path / "laminar-audit-left" / "logs").mkdir(parents=True)  # of a process that was killed
    server = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=places)
    assert server.stderr is not None
    try:
        url_line = next(line for line in server.stderr if "http://" in line)
        url = re.search(r"http://\S+", url_line)
        assert url is not None
        with urllib.request.urlopen(url[0], timeout=60) as response:
            text = response.read().decode()
        assert f'laminar_trainer_reward_mean{{run="{RUN}"}} 0.5' in text
        while "laminar_audit_passed" not in text:
            assert server.poll() is None
            time.sleep(0.1)  # leave the cores to the audit
            with urllib.request.urlopen(url[0], timeout=60) as response:
                text = response.read().decode()
        assert f'laminar_audit_findings{{finding="lost",run="{RUN}"}} ' in text
        ended = float(re.search(r"^laminar_audit_timestamp_seconds{.*} (\S+)$", text, re.M)[1])  # type: ignore[index]
        assert started < ended <= time.time()
        assert [path.name.startswith("laminar-audit-") for path in tmp_path.iterdir()] == [True]
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 128 + signal.SIGTERM
        assert list(tmp_path.iterdir()) == []
    finally:
        server.kill()
        server.stderr.close()
        server.wait()


def test_metrics_serve_names_the_port_in_use(laminar: Laminar) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        code, _, err = laminar("metrics", "serve", "--port", str(port))
    assert code == 1
    assert err == f"laminar: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port\n"
