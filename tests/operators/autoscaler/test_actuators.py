"""Actuators: a command of the user's, and the scale sub-resource of a Kubernetes API server over TLS."""

from __future__ import annotations

import json
import os
import signal
import ssl
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from infra.certificates import Authority
from operators.autoscaler.actuators import ActuatorFailed, Command, LocalFleet
from operators.autoscaler.kubernetes import StatefulSetScale
from schemas.records import ScalingDecision

DECISION = ScalingDecision(7, "queue", 2, 2, 5, "2.00 requests a slot", False, 0)
PATH = "/apis/apps/v1/namespaces/rl/statefulsets/laminar-first-rollout/scale"


def test_command_gets_the_decision_in_its_environment(tmp_path: Path) -> None:
    script = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    Command("first", (sys.executable, "-c", script, str(tmp_path / "seen"))).apply(DECISION, ("b", "a"), 30)
    seen = json.loads((tmp_path / "seen").read_text())
    assert {name: value for name, value in seen.items() if name.startswith("LAMINAR_")} == {
        "LAMINAR_RUN": "first",
        "LAMINAR_DECISION": "7",
        "LAMINAR_BEFORE": "2",
        "LAMINAR_TARGET": "5",
        "LAMINAR_REASON": "2.00 requests a slot",
        "LAMINAR_MACHINES": "b a",
    }


@pytest.mark.parametrize(
    ("command", "timeout_s", "problem"),
    [
        (("/no/such/program",), 30, "autoscaling.command '/no/such/program' cannot be run: No such file"),
        ((sys.executable, "-c", "import sys; sys.exit('no quota')"), 30, "exited with code 1: no quota"),
        ((sys.executable, "-c", "raise SystemExit(3)"), 30, "exited with code 3: without output"),
        ((sys.executable, "-c", "print('é' * 10**6); raise SystemExit(4)"), 30, "exited with code 4: é{500}$"),
        ((sys.executable, "-c", "import time; time.sleep(60)"), 0.2, "did not end in 0.2 s"),
    ],
)
def test_command_that_fails_is_an_error_with_its_output(command: Any, timeout_s: float, problem: str) -> None:
    with pytest.raises(ActuatorFailed, match=problem):
        Command("first", command).apply(DECISION, (), timeout_s)


def test_command_without_a_place_for_its_output_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    with pytest.raises(ActuatorFailed, match=r"'true' cannot be run: No such file or directory \(/nonexistent/"):
        Command("first", ("true",)).apply(DECISION, (), 30)


def test_command_may_leave_a_child_with_its_output() -> None:
    child = "import time; time.sleep(60)"
    script = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, file=sys.stderr)"
    with pytest.raises(ActuatorFailed, match=r"code 5: \d+$") as failed:
        Command("first", (sys.executable, "-c", f"{script}; raise SystemExit(5)")).apply(DECISION, (), 30)
    os.kill(int(str(failed.value).rsplit(maxsplit=1)[1]), signal.SIGKILL)


def test_local_fleet_sends_no_request() -> None:
    LocalFleet().apply(DECISION, (), 1)


class ApiServer:
    """An API server with one StatefulSet: it knows one token, and whether that may patch the scale."""

    def __init__(self, folder: Path) -> None:
        outer = self
        self.replicas, self.may_patch = 2, True
        self.requests: list[tuple[str, str]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_PATCH(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.requests.append((self.command, self.path))
                status, answer = outer.patch(self.path, self.headers, body)
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_: object) -> None:
                pass

        authority = Authority.create()
        authority.write(folder / "ca.crt", folder / "ca.key")
        (folder / "server.pem").write_text(authority.issue("kubernetes", ("127.0.0.1",)))
        (folder / "token").write_text("a-token\n")
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.pem")
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def patch(self, path: str, headers: Any, body: bytes) -> tuple[int, dict[str, Any]]:
        """The answer of an API server to a merge patch of a scale."""
        if headers["authorization"] != "Bearer a-token":
            return 401, _status("Unauthorized")
        if path != PATH:
            return 404, _status(f'statefulsets.apps "{path.split("/")[-2]}" not found')
        if not self.may_patch:
            return 403, _status(
                'statefulsets.apps "laminar-first-rollout" is forbidden: cannot patch "statefulsets/scale"'
            )
        if headers["content-type"] != "application/merge-patch+json":
            return 415, _status("the body of the request was in an unknown format")
        self.replicas = json.loads(body)["spec"]["replicas"]
        return 200, {"kind": "Scale", "spec": {"replicas": self.replicas}}

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _status(message: str) -> dict[str, Any]:
    return {"kind": "Status", "status": "Failure", "message": message}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    made = ApiServer(tmp_path)
    yield made
    made.close()


def test_kubernetes_scale_is_patched_with_the_service_account(server: ApiServer, tmp_path: Path) -> None:
    scale = StatefulSetScale("rl", "laminar-first-rollout", server.url, tmp_path)
    for _ in range(2):  # a repeated decision changes nothing
        scale.apply(DECISION, (), 10)
        assert server.replicas == 5
    assert server.requests == 2 * [("PATCH", PATH)]


def test_kubernetes_names_the_right_that_is_missing(server: ApiServer, tmp_path: Path) -> None:
    server.may_patch = False
    with pytest.raises(
        ActuatorFailed, match=r"403 statefulsets.apps .* is forbidden.*verb patch on statefulsets/scale"
    ):
        StatefulSetScale("rl", "laminar-first-rollout", server.url, tmp_path).apply(DECISION, (), 10)
    assert server.replicas == 2


def test_kubernetes_names_a_token_that_is_not_valid(server: ApiServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("another")
    with pytest.raises(ActuatorFailed, match=r"401 Unauthorized; is the service account's token valid"):
        StatefulSetScale("rl", "laminar-first-rollout", server.url, tmp_path).apply(DECISION, (), 10)


def test_kubernetes_names_a_stateful_set_that_does_not_exist(server: ApiServer, tmp_path: Path) -> None:
    with pytest.raises(
        ActuatorFailed, match=r'404 statefulsets\.apps "other" not found; see autoscaling\.kubernetes_name'
    ):
        StatefulSetScale("rl", "other", server.url, tmp_path).apply(DECISION, (), 10)


def test_kubernetes_sends_no_token_to_another_authority(server: ApiServer, tmp_path: Path) -> None:
    Authority.create().write(tmp_path / "ca.crt", tmp_path / "other.key")
    with pytest.raises(ActuatorFailed, match=r"does not respond: .*certificate verify failed"):
        StatefulSetScale("rl", "laminar-first-rollout", server.url, tmp_path).apply(DECISION, (), 10)
    assert server.requests == []


def test_kubernetes_needs_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ActuatorFailed, match=r"no service account in .*must run in a pod of the cluster"):
        StatefulSetScale("rl", "a", account=tmp_path / "none").apply(DECISION, (), 10)
    (tmp_path / "token").write_text("t")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ActuatorFailed, match="KUBERNETES_SERVICE_HOST is not set"):
        StatefulSetScale("rl", "a", account=tmp_path).apply(DECISION, (), 10)
