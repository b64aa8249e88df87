"""The roles of a run of release 0.2.0 are replaced one by one by this release, and one goes back, without a stop.

Trainer and rollouts are on two "machines" with stores of their own, so that weights travel between relays of two
releases, over TLS. The old release is a wheel of its commit in this repository's history.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from small_runs import LENGTH_REWARD, SMALL

from infra.certificates import write_relay_files
from infra.kafka.broker import Broker
from infra.kafka.ranges import UnknownTopic
from infra.kafka.run_release import read_release
from infra.kafka.topic_reader import read_topic
from infra.store.names import default_root
from infra.store.ownership import remove_store
from pipelines.inspect.audit.audit_run import audit
from schemas.records import PolicyVersion, ReplicaStatus
from schemas.release import FIRST, NEWEST
from schemas.topics import BATCHES, DEAD_LETTERS, EXPERIENCES, REPLICAS

REPOSITORY = Path(__file__).parents[2]
OLD = "daa3d10"
"""The commit of release 0.2.0, see CHANGELOG.md."""
COMMAND = "import sys; from pipelines.cli.main import main; sys.argv[0] = 'laminar'; sys.exit(main())"
TRAINING, GENERATING = 0, 1
"""The machines, each with a store and a relay."""
ROLES = {
    "prompts": TRAINING,
    "placement": TRAINING,
    "score": TRAINING,
    "experience": TRAINING,
    "trainer": TRAINING,
    "evaluation": TRAINING,
    "relay-0": TRAINING,
    "relay-1": GENERATING,
    "rollout-0": GENERATING,
    "rollout-1": GENERATING,
}
"""The roles of the run and their machines."""
PROGRESS_S = 240.0


@pytest.fixture(scope="module")
def old_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel of release 0.2.0 installs."""
    folder = tmp_path_factory.mktemp("release-0.2.0")
    archive = subprocess.run(["git", "archive", OLD], cwd=REPOSITORY, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"commit {OLD} of release 0.2.0 is not in this checkout: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
    build = [str(Path(sys.executable).parent / "uv"), "build", "--quiet", "--wheel", "--no-build-isolation"]
    subprocess.run([*build, "--python", sys.executable, "--out-dir", "dist", "."], cwd=folder, check=True)
    (wheel,) = (folder / "dist").glob("*-0.2.0-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "installed")
    return folder / "installed"


class Cluster:
    """The processes of a run, of two releases."""

    def __init__(self, stack: ExitStack, broker: Broker, run: str, model: Path, here: Path, old: Path) -> None:
        self.run, self.client = run, broker.client()
        self._here, self._sources = here, {"old": old, "new": REPOSITORY}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._releases: dict[str, str] = {}
        self._stores = [default_root(f"{run}-machine-{machine}") for machine in (TRAINING, GENERATING)]
        for store in self._stores:
            stack.callback(remove_store, store, in_use=True)
        write_relay_files(here / "tls")
        files = {"token_file": "relay-token", "certificate_file": "relay.pem", "authority_file": "ca.pem"}
        relay = {"heartbeat_s": 0.5, **{setting: str(here / "tls" / name) for setting, name in files.items()}}
        settings = {
            "run": {"name": run, "folder": str(here / "runs")},
            "kafka": {"bootstrap_servers": broker.bootstrap_servers, "partitions": 2},
            "model": {"path": str(model)},
            "trainer": {"optimizer_steps": 100_000, "checkpoint_every": 1000},
            "rollout": {"slots": 16, "processes": 2},
            "relay": relay,
            "evaluation": {"every": 5},
        }
        self.config = here / "config.toml"
        self.config.write_text(tomli_w.dumps({**SMALL, **settings}))
        stack.callback(self.kill)

    def start(self, role: str, release: str) -> None:
        pipeline, _, index = role.partition("-")
        store = f"relay.store={self._stores[ROLES[role]]}"
        words = ["submit", pipeline, str(self.config), "--set", store, "--set", LENGTH_REWARD]
        words += ["--index", index] if index else []
        self._releases[role] = release
        with self._log(role, release).open("ab") as log:
            self._processes[role] = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", COMMAND, *words],
                cwd=self._here,
                env={**os.environ, "PYTHONPATH": str(self._sources[release])},
                stdout=log,
                stderr=log,
            )

    def replace(self, role: str, release: str) -> None:
        """Stop `role`, start it with `release`, and wait until the run makes batches and rollouts get weights again."""
        process = self._processes.pop(role)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        self.start(role, release)
        self.until_progress(f"{role} of the {release} release")

    def until_progress(self, what: str) -> None:
        batches, version = self._count(BATCHES), self._newest_version()
        self.until(lambda: self._count(BATCHES) > batches + 2, f"batches: {what}")
        self.until(lambda: self._newest_version() > version, f"weights: {what}")

    def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + PROGRESS_S
        while not condition():
            ended = [role for role, process in self._processes.items() if process.poll() is not None]
            for role in [role for role in ended if self._may_end(role)]:
                ended.remove(role)
                self.start(role, "old")
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"{what}: {ended or 'all'} of the roles stand still\n{self.logs()}")
            time.sleep(0.3)

    def _may_end(self, role: str) -> bool:
        """A store of 0.2.0 removes the list of live versions while its relay writes it: it must be started again."""
        is_old_relay = role.startswith("relay-") and self._releases[role] == "old"
        return is_old_relay and "was removed" in self._log(role, "old").read_text()[-2000:]

    def laminar(self, *words: str) -> tuple[int, Any]:
        """The exit code and JSON of a command of the new release."""
        command = [sys.executable, "-W", "ignore", "-c", COMMAND, *words, "-b", self.client.bootstrap_servers, "--json"]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(
            [*command, "--run", self.run], cwd=self._here, env=environment, capture_output=True, check=False
        )
        return done.returncode, json.loads(done.stdout)

    def schemas(self, topic: Any) -> set[str]:
        """The schemas of the records of `topic`."""
        return {record.schema for record in read_topic(self.client, topic.name(self.run))}

    def logs(self) -> str:
        return "\n".join(f"{file.name}:\n{file.read_text()[-2000:]}" for file in sorted(self._here.glob("*.log")))

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _count(self, topic: Any) -> int:
        try:
            return sum(1 for _ in read_topic(self.client, topic.name(self.run)))
        except UnknownTopic:  # the old roles have not made it yet
            return 0

    def _newest_version(self) -> PolicyVersion:
        """The newest version that a rollout has had, on the machine that gets weights through relays."""
        try:
            statuses = [row for record in read_topic(self.client, REPLICAS.name(self.run)) for row in record.rows]
        except UnknownTopic:
            statuses = []
        versions = [row.policy_version for row in statuses if isinstance(row, ReplicaStatus)]
        return max(filter(None, versions), default=PolicyVersion(0, 0))

    def _log(self, role: str, release: str) -> Path:
        return self._here / f"{role}-{release}.log"


@pytest.fixture
def cluster(broker: Broker, run_id: str, model_folder: Path, tmp_path: Path, old_release: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, broker, f"{run_id}-{os.getpid()}", model_folder, tmp_path, old_release)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_roles_are_upgraded_one_by_one(cluster: Cluster) -> None:
    for role in ROLES:
        cluster.start(role, "old")
    cluster.until_progress("the old release")

    for role in ROLES:
        cluster.replace(role, "new")
        if role == "placement":  # one role of the new release makes the topics that the old one lacks
            assert read_release(cluster.client, cluster.run) == FIRST
            code, found = cluster.laminar("runs", "upgrade")
            assert (code, found["release"]) == (1, FIRST)
            assert {"experience.0", "relay.1", "rollout.1"} < {each["role"] for each in found["older_roles"]}
    cluster.replace("experience", "old")  # an upgrade can be taken back
    cluster.replace("rollout-1", "old")
    cluster.replace("rollout-1", "new")
    assert cluster.schemas(EXPERIENCES) == {"Experience/2"}
    code, found = cluster.laminar("runs", "upgrade")
    assert (code, [each["role"] for each in found["older_roles"]]) == (1, ["experience.0"])
    cluster.replace("experience", "new")

    assert cluster.laminar("runs", "upgrade") == (
        0,
        {"run": cluster.run, "before": FIRST, "release": NEWEST, "older_roles": []},
    )
    for role in ("relay-1", "rollout-0", "score"):
        cluster.replace(role, "new")
    assert len(cluster.schemas(EXPERIENCES)) == 2
    assert {"ReplicaStatus/2", "ReplicaStatus/5"} <= cluster.schemas(REPLICAS)
    found = audit(cluster.client, cluster.run)
    assert found.passed
    assert found.trained > 0
    assert cluster.schemas(DEAD_LETTERS) == set()
