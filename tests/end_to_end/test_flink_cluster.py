"""The data plane of a run as one job of a Flink cluster, whose processes are killed one after the other.

A job manager and two task managers, with a pool of workers beside each of these, as the FlinkDeployment of a run
configures them; as root each on a host of its own, a network namespace, otherwise on loopback. As root the pools, and
what submits the deployed run, have exactly the mounts, rights and environment of their manifests. The tests are in
order, on one run.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w
from faults.cluster import Cluster
from faults.network import Network, NoNetwork, within
from flink_pods import FlinkOfPods, FlinkPods, deployed_plan, flink_manifests, pods_of, settings_of
from kafka import TopicPartition
from pods import until_all

from benchmarks.flink_cluster import MANAGER, FlinkCluster, Place, loopback
from infra.deploy.kubernetes.names import FLINK_REST_PORT
from infra.deploy.kubernetes.pods import POOL_PORT
from infra.deploy.plan import DeploymentPlan
from infra.kafka.broker import BrokerConfig, start_broker
from infra.kafka.note import Note, last_notes, uncommitted_consumer
from infra.kafka.properties import ClientProperties
from infra.kafka.readiness import wait_for_brokers
from infra.kafka.topic_reader import read_rows
from infra.processes import spawn
from infra.runners.flink_jars import FLINK
from infra.runners.releases import installed
from pipelines.config import Config, load_config
from pipelines.distribution import LAMINAR
from pipelines.inspect.audit.audit_run import audit
from pipelines.inspect.run_folders import list_runs
from pipelines.inspect.submissions import Submission, submissions
from pipelines.run.topics import make_topics
from schemas.records import Metric
from schemas.topics import METRICS, RESTORE, run_prefix

pytestmark = [
    pytest.mark.skipif("LAMINAR_TEST_FLINK" not in os.environ, reason="make flink-test has it"),
    pytest.mark.usefixtures("killed_programs"),
]
RUN, DEPLOYED = "flink-cluster", "flink-goal"
"""The run of most tests, and one that the pod of its Deployment submits."""
TASKS = ("task1", "task2")
KAFKA, MODELS, SUBMITTER = "kafka", "models", "submitter"
"""The hosts of the broker, of rollouts and trainer, and of that pod."""
STEPS = 2
"""Optimizer steps after which the run has evidently continued."""
NO_PODS = "pods are executed in network namespaces only"
GOAL = 5
"""Optimizer steps of the run that ends by itself."""
PATIENCE_S = 300.0


@dataclass
class ClusterRun:
    """A run whose data plane is a job of `flink`, and how the test's process reaches its broker."""

    config: Config
    flink: FlinkCluster
    place: Place
    reach: Callable[[Callable[[], Any]], Any]
    pods: FlinkPods | None = None
    """Those of the deployed run; None on loopback."""

    def start(self, folder: Path, stack: ExitStack) -> None:
        """Create the topics, and start a rollout and the trainer with files in `folder`; `stack` ends them."""
        self.reach(lambda: wait_for_brokers(self.client, 120.0, lambda *_: None))
        self.reach(lambda: make_topics(self.config))
        file = str(folder / f"{self.config.run.name}.toml")
        for role in ("rollout", "trainer"):
            stack.callback(end, submit(self.place, MODELS, folder, role, file))

    @property
    def client(self) -> ClientProperties:
        return self.config.kafka.client()

    @property
    def submission(self) -> Submission:
        (found,) = submissions(self.config.run_folder)
        return found

    def kill(self) -> None:
        """Kill its submissions."""
        for each in submissions(self.config.run_folder):
            end(each.respawner())

    def stop(self) -> None:
        """Stop the submission of the data plane, and wait for its end."""
        respawner = self.submission.respawner()
        assert respawner is not None
        respawner.terminate()
        self.until(lambda: self.submission.respawner() is None, "the end of the submission")

    def step(self) -> int:
        """The optimizer steps so far."""
        rows = self.reach(lambda: list(read_rows(self.client, METRICS.name(self.config.run.name), Metric)))
        return max((row.step for row in rows if row.name == "trainer"), default=0)

    def notes(self) -> dict[str, Note]:
        """The last note of each shard of the data plane, by its group without the run's prefix."""

        def read() -> dict[str, Note]:
            observer = uncommitted_consumer(self.client)
            try:
                found = last_notes(observer, TopicPartition(RESTORE.name(RUN), 0), run_prefix(RUN))
            finally:
                observer.close(autocommit=False)
            return {group.removeprefix(run_prefix(RUN)): note for group, note in found.items()}

        found = self.reach(read)
        return {group: note for group, note in found.items() if not group.startswith(("rollout", "trainer"))}

    def starts(self) -> dict[str, int]:
        """The start number of each shard of the data plane."""
        return {group: note.start for group, note in self.notes().items()}

    def resume(self, folder: Path, *changes: str) -> None:
        """Submit the data plane again, with `changes`, where the job manager is."""
        words = [word for change in changes for word in ("--set", change)]
        at = ["--run", self.config.run.name, "--folder", str(self.config.run.folder)]
        command = self.place.command(MANAGER, [*LAMINAR, "runs", "resume", *at, *words])
        log = folder / "resume.log"
        assert spawn(command, log, die_with_parent=False).wait(2 * PATIENCE_S) == 0, log.read_text()

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until `condition` holds. Raises AssertionError with the end of the log."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            logs = [each.log for each in submissions(self.config.run_folder) if each.log.exists()]
            text = "\n".join(log.read_text()[-3000:] for log in logs)
            assert time.monotonic() < deadline, f"{what}: not in {PATIENCE_S:g} s; step {self.step()}\n{text}"
            time.sleep(0.5)

    def until_it_continues(self, starts: dict[str, int]) -> None:
        """Wait until every shard has a later start than in `starts`, and the run makes more steps."""
        self.until(lambda: all(start > starts.get(group, 0) for group, start in self.starts().items()), "new starts")
        before = self.step()
        self.until(lambda: self.step() >= before + STEPS, "more steps")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterRun]:
    folder = tmp_path_factory.mktemp("cluster")
    with ExitStack() as stack:
        place, reach, servers, network = hosts(stack, folder)
        plan = deployed_plan(settings_of(DEPLOYED, servers, GOAL), len(TASKS), folder)
        pods = None if network is None else pods_of(plan, network, folder / "pods", TASKS, SUBMITTER)
        flink = deployed_flink(folder / "flink", place, plan, pods)
        stack.callback(flink.stop)
        flink.start()
        made = ClusterRun(configured(folder, RUN, servers, 100_000), flink, place, reach, pods)
        stack.callback(made.kill)
        made.start(folder, stack)
        how = ("--runner", "flink", "--detach", "--", *flink.options)
        submitting = submit(place, MANAGER, folder, "data-plane", str(folder / f"{RUN}.toml"), *how)
        stack.callback(end, submitting)
        assert submitting.wait(120) == 0, (folder / "data-plane.log").read_text()
        yield made


def deployed_flink(folder: Path, place: Place, plan: DeploymentPlan, pods: FlinkPods | None) -> FlinkCluster:
    """A cluster with the settings and the slots of the FlinkDeployment of `plan`, and its worker pools, in `pods` or
    as processes with the same command."""
    deployment, _ = flink_manifests(plan)
    spec = deployment["spec"]
    settings, managers = dict(spec["flinkConfiguration"]), spec["taskManager"]
    _, pool = managers["podTemplate"]["spec"]["containers"]
    *command, port = pool["command"]
    assert (managers["replicas"], spec["flinkVersion"], port) == (
        len(TASKS),
        f"v{FLINK.replace('.', '_')}",
        str(POOL_PORT),
    )
    slots = int(settings.pop("taskmanager.numberOfTaskSlots"))
    if pods is None:
        return FlinkCluster(folder, TASKS, place, slots, settings, [sys.executable, *command[1:]])
    ports = {"rest_port": FLINK_REST_PORT, "pool_port": POOL_PORT}
    return FlinkOfPods(folder, TASKS, place, slots, settings, **ports, containers=pods.pools)


def configured(folder: Path, name: str, servers: str, goal: int) -> Config:
    """The run `name` with its files in `folder`, where its configuration is written to."""
    settings = settings_of(name, servers, goal)
    settings["run"]["folder"] = str(folder / "runs")
    file = folder / f"{name}.toml"
    file.write_text(tomli_w.dumps({**settings, "relay": {"store": str(folder / f"{name}-store")}}))
    return load_config(file)


def hosts(stack: ExitStack, folder: Path) -> tuple[Place, Callable[[Callable[[], Any]], Any], str, Network | None]:
    """The hosts, how to reach the broker from here, its address, and the network (None: loopback); the broker is
    started."""
    names = (MANAGER, *TASKS, KAFKA, MODELS, SUBMITTER)
    try:
        network = stack.enter_context(Network(names, net="198.18.79"))
    except NoNetwork:
        broker = stack.enter_context(start_broker(BrokerConfig(folder / "kafka")))
        return loopback((*TASKS, MODELS)), lambda work: work(), broker.bootstrap_servers, None
    cluster = Cluster(network, (KAFKA,), folder / "kafka")
    stack.callback(cluster.stop)
    cluster.start()
    place = Place(
        {name: network.hosts[name].address for name in names},
        lambda name, command: network.command(name, *command),
        lambda work: within(network.hosts[MANAGER], work),
    )
    return place, lambda work: within(network.hosts[KAFKA], work), cluster.client.bootstrap_servers, network


def submit(place: Place, host: str, folder: Path, role: str, *arguments: str) -> psutil.Process:
    whole = place.command(host, [*LAMINAR, "submit", role, *arguments])
    return spawn(whole, folder / f"{role}.log", die_with_parent="--detach" not in arguments)


def role_step(role: str) -> str:
    """A part of the name of the vertex in which `role` reads its records and folds them."""
    return f"]{role}/{{"


def end(process: psutil.Process | None) -> None:
    """Kill `process` and what it has started, unless it has ended."""
    if process is not None and process.is_running():
        for each in [process, *process.children(recursive=True)]:
            each.kill()
        process.wait(30)


def test_flink_cluster_runs_the_data_plane_as_one_job(run: ClusterRun) -> None:
    run.until(lambda: run.step() >= STEPS, "first steps")
    assert len(run.flink.jobs()) == 1
    roles = {"prompts.0", "placement.0", "score.0", "score.1", "experience.0", "experience.1"}
    assert set(run.starts()) == roles
    (found,) = list_runs(run.config.run.folder)
    assert found.state["phase"] == "training"


def test_flink_distributes_the_shards_over_its_task_managers(run: ClusterRun) -> None:
    logs = [run.flink.log(pool).read_text() for pool in run.flink.pools]
    if len(logs) == 1:
        pytest.skip("on loopback both task managers share a pool")
    for role in ("score", "experience"):
        found = [{shard for shard in "01" if f"start 1 of {run_prefix(RUN)}{role}.{shard} " in log} for log in logs]
        assert sorted(map(sorted, found)) == [["0"], ["1"]], role


def test_flink_gets_the_options_of_which_beam_warned(run: ClusterRun) -> None:
    (job,) = run.flink.jobs()
    given = run.flink.rest(f"/jobs/{job}/config")["execution-config"]
    assert given["user-config"]["maxBundleSize"] == "100"
    assert given["user-config"]["maxBundleTimeMills"] == "20"
    assert "#18 restart attempts" in given["restart-strategy"]
    assert run.flink.rest(f"/jobs/{job}/checkpoints/config")["interval"] == 1000
    assert "Unparseable" not in run.submission.log.read_text()


def test_flink_has_counters_and_watermarks_of_the_steps(run: ClusterRun) -> None:
    def dispatched() -> float:
        return sum(run.flink.metrics(role_step("placement"), "laminar_placed/dispatch"))

    def watermarks() -> list[float]:
        """Of both shards' output, in seconds."""
        return [value / 1e3 for value in run.flink.metrics(role_step("score"), "currentOutputWatermark")]

    run.until(dispatched, "placed trajectories in Flink's metrics")
    first, begun = dispatched(), time.time()
    run.until(lambda: dispatched() > first, "more placed trajectories")
    run.until(lambda: min(watermarks(), default=0) > begun, "watermarks of records that were written since")
    assert len(watermarks()) == len(TASKS)
    assert max(watermarks()) <= time.time(), "records of the future"


def test_run_continues_after_a_flink_task_manager_is_killed(run: ClusterRun) -> None:
    before = run.starts()
    run.flink.kill(TASKS[0])
    run.flink.start_process(TASKS[0])
    run.until_it_continues(before)
    assert not run.submission.restarts, "Flink restores the job by itself"


def test_run_continues_after_the_flink_job_manager_is_killed(run: ClusterRun) -> None:
    before = run.starts()
    run.flink.kill(MANAGER)
    run.flink.start_process(MANAGER)
    run.until_it_continues(before)
    assert run.submission.restarts, "the job is submitted again: the new job manager does not know it"


def test_run_continues_after_a_flink_worker_pool_is_killed(run: ClusterRun) -> None:
    before, pool = run.starts(), run.flink.pools[0]
    run.flink.kill(pool)
    run.flink.start_process(pool)
    run.until_it_continues(before)


def test_run_continues_after_its_submitting_process_is_killed(run: ClusterRun) -> None:
    before, (job,) = run.starts(), run.flink.jobs()
    submitting = run.submission.working_process()
    assert submitting is not None
    submitting.kill()
    run.until_it_continues(before)
    assert len(run.flink.jobs()) == 1, "the job of the killed process was cancelled, as it had all slots"
    assert job not in run.flink.jobs()


def test_run_on_a_killed_flink_cluster_passes_the_audit(run: ClusterRun) -> None:
    found = run.reach(lambda: audit(run.client, RUN))
    assert found.passed, found
    assert found.trained >= run.config.experience.global_batch * STEPS


def test_flink_takes_another_number_of_shards_on_resume(run: ClusterRun, tmp_path: Path) -> None:
    before = run.starts()
    run.resume(tmp_path, "score.shards=3", "experience.shards=1")
    # The change begins, and seals, one start of each old shard.
    sealed = {group: start + 1 for group, start in before.items() if group.startswith(("score", "experience"))}
    groups = {"prompts.0", "placement.0", "score.0", "score.1", "score.2", "experience.0"}
    earlier = {**before, **sealed}
    run.until(lambda: all(run.starts().get(group, 0) > earlier.get(group, 0) for group in groups), "new starts")
    done = run.step()
    run.until(lambda: run.step() >= done + STEPS, "more steps")
    notes = run.notes()
    assert notes.keys() == groups | {"experience.1"}
    assert {group for group, note in notes.items() if note.sealed} == {"experience.1"}
    assert {group: note.shards for group, note in notes.items() if group in groups} == {
        **dict.fromkeys(("prompts.0", "placement.0", "experience.0"), 1),
        **dict.fromkeys(("score.0", "score.1", "score.2"), 3),
    }
    assert len(run.flink.jobs()) == 1
    found = run.reach(lambda: audit(run.client, RUN))
    assert found.passed, found
    assert found.trained >= run.config.experience.global_batch * done


def test_stop_of_a_submission_ends_its_job_on_the_cluster(run: ClusterRun) -> None:
    run.stop()
    states = {each["status"] for each in run.flink.rest("/jobs")["jobs"]}
    assert states <= {"CANCELED", "FAILED", "FINISHED"}, run.submission.log.read_text()[-3000:]
    assert not run.flink.workers(), "they have committed their last outputs"


def test_flink_worker_pools_of_another_release_refuse_a_job(run: ClusterRun, tmp_path: Path) -> None:
    if run.pods is None or not isinstance(run.flink, FlinkOfPods):
        pytest.skip(NO_PODS)
    pod, old = run.pods.submitter, run.pods.of_release("0.0.1")
    config = configured(tmp_path, DEPLOYED, run.config.kafka.bootstrap_servers, GOAL)
    run.reach(lambda: make_topics(config))
    with ExitStack() as stack:
        run.flink.replace_pools(old)
        stack.callback(run.flink.replace_pools, run.pods.pools)
        stack.callback(pod.kill)
        pod.start()
        refused = f"instead of {installed()['laminar-rl']}, which the job was submitted with: stop the submission"
        run.until(lambda: any(f"laminar-rl 0.0.1 {refused}" in each.log.read_text() for each in old.values()), refused)
        pod.evict(PATIENCE_S)
        assert not run.flink.jobs()


def test_deployed_data_plane_on_flink_reaches_its_goal(run: ClusterRun, tmp_path: Path) -> None:
    """A run of its own, submitted by the pod of its Deployment, in the slots that the other one has left."""
    if run.pods is None:
        pytest.skip(NO_PODS)
    pod, servers = run.pods.submitter, run.config.kafka.bootstrap_servers
    with ExitStack() as stack:
        short = ClusterRun(configured(tmp_path, DEPLOYED, servers, GOAL), run.flink, run.place, run.reach)
        short.start(tmp_path, stack)
        stack.callback(pod.kill)
        pod.start()
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            until_all([pod], probe, PATIENCE_S)
        short.until(lambda: short.step() >= GOAL or not pod.running, "the goal")
        assert pod.running, pod.log.read_text()[-3000:]
        pod.send(signal.SIGTERM)
        pod.wait(PATIENCE_S)
        found = short.reach(lambda: audit(short.client, short.config.run.name, ended=True))
        assert found.passed, found
        assert found.trained == GOAL * short.config.experience.global_batch
