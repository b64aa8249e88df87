"""`laminar run` with a warm start, from the command to its files, and a next run that finds the warm start."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from first_day import NOISE
from laminar_runs import REPOSITORY, LaminarRun, StartRun
from small_runs import COMPACT
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.kafka.broker import Broker
from infra.listening import exposed_addresses, listening_sockets
from infra.models.checkpoint_list import list_checkpoints
from infra.store.names import OWNER
from operators.trainer.checkpoint import read_position
from pipelines.config import load_config
from pipelines.inspect.metrics_file import read_metrics
from pipelines.roles import roles_of
from schemas.records import PolicyVersion

NAME = f"whole-run-{os.getpid()}"
STEPS = 8
WARM_START = (
    "model.path=''",
    "run.trackers=['tensorboard']",
    "warm_start={examples = 64, steps = 2, batch = 8, measured = 8, measure_every = 1, max_new_tokens = 4}",
)

EXPECTED_METRICS = {
    "trainer": "reward/mean reward/std frac_reward_zero_std response_length/mean response_length/max "
    "response_length/clip_ratio grad_norm staleness/mean staleness/max queue/lag trainer/idle_ratio "
    "weight_sync/seconds throughput/tokens_per_s throughput/samples_per_s time/update",
    "experience": "dropped_stale dropped staleness/0 staleness_at_finish/0",
    "rollout": "rollout/idle_ratio",
}
"""Metric names that users of other trainers expect, by series; without ratios, as this model always answers alike."""


COMMON_UMASK = 0o022
"""With which a shell starts commands: files would be readable for everybody."""


class _Terminal:
    """Starts the command as a shell does, with all imports."""

    def __init__(self, temporary: Path) -> None:
        self.temporary = temporary
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, arguments: list[str], folder: Path, output: Path) -> int:
        command = [sys.executable, "-c", "from pipelines.cli.main import main; main()", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(self.temporary)}
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command, cwd=folder, stdout=file, stderr=file, env=environment, umask=COMMON_UMASK
            )
        return self._process.pid

    def exit_code(self, pid: int) -> int | None:
        assert self._process is not None
        return self._process.poll()


def unix_addresses(processes: Iterable[psutil.Process]) -> set[str]:
    """Path, or "@" and name, of each Unix socket that `processes` have bound; ended processes are skipped."""
    found = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            found |= {str(each.laddr) for each in process.net_connections("unix") if each.laddr}
    return found


@pytest.fixture(scope="module")
def ended(small_config: Path, tmp_path_factory: pytest.TempPathFactory) -> LaminarRun:
    here = tmp_path_factory.mktemp("here")
    run = LaminarRun(_Terminal(tmp_path_factory.mktemp("tmp")), here, small_config, NAME, *WARM_START)  # type: ignore[arg-type]
    try:
        run.until(run.state, 170, "its state")
        sockets: set[tuple[str, int]] = set()
        unix: set[str] = set()
        owners: set[tuple[int, str]] = set()
        deadline = time.monotonic() + 170
        while run.exit_code() is None and time.monotonic() < deadline:
            sockets |= listening_sockets(run.processes())
            unix |= unix_addresses(run.processes())
            with suppress(FileNotFoundError, json.JSONDecodeError):  # it is being written
                owner = json.loads((run.weights_folder() / OWNER).read_text())
                owners.add((owner["pid"], owner["run"]))
            time.sleep(0.5)
        run.wait(1)
        leftovers = run.leftovers()
    finally:
        run.clean_up()
    assert not leftovers
    assert len(sockets) >= 3, (sockets, run.output()[-2000:])  # the broker's two, the relay's
    assert not exposed_addresses(sockets)
    assert owners == {(run.pid, str(run.folder))}  # the store is in use before, between and after its roles' starts
    assert not unix  # a name without a path would be open to every user of the machine
    return run


def test_run_reaches_its_goal_and_passes_the_audit(ended: LaminarRun) -> None:
    assert ended.exit_code() == 0, ended.output()
    audit = ended.audit()
    assert audit["passed"]
    assert audit["trained"] == STEPS * 16
    assert audit["evaluated"] == 32  # eight questions, greedy and sampled, of the first and the last version
    assert (audit["lost"], audit["trained_twice"]) == (0, 0)
    state = ended.state()
    assert (state["phase"], state["error"], state["goal"]) == ("ended", None, {"optimizer_steps": STEPS})
    before = ["starting", "broker", "checks", "warm start"]
    assert list(state["phases"]) == [*before, "training", "final evaluation", "draining", "audit"]
    assert not any(role["restarts"] or role["alive"] for role in state["roles"].values())


def summary_of(run: LaminarRun) -> dict[str, Any]:
    return dict(json.loads((run.folder / "summary.json").read_text()))


def test_run_summary_is_complete(ended: LaminarRun) -> None:
    summary, audit, state = summary_of(ended), ended.audit(), ended.state()
    expected = {"run": NAME, "reached": True, "error": None, "audit_passed": True, "lost": 0, "trained_twice": 0}
    expected |= {"trajectories_trained": STEPS * 16, "optimizer_steps": STEPS}
    expected |= {"heldout_questions": 8, "phases": state["phases"]}
    assert {key: summary[key] for key in expected} == expected
    # A version is skipped while the one before it is being published.
    assert 2 <= summary["weight_versions"] <= STEPS + 1
    shares = [f"heldout_{which}" for which in ("before", "after", "sampled_before", "sampled_after", "warm_start_best")]
    for key in ("reward_first", "reward_last", *shares):
        assert 0 <= summary[key] <= 1, key
    assert 0 <= summary["staleness_mean"] <= summary["staleness_max"]
    assert summary["tokens_generated"] >= audit["trained"] + audit["evaluated"]
    assert summary["wall_seconds"] == pytest.approx(state["ended_at"] - state["started_at"])


def test_next_run_finds_the_warm_start(ended: LaminarRun, start_run: StartRun, broker: Broker, run_id: str) -> None:
    servers = f"kafka.bootstrap_servers={broker.bootstrap_servers}"
    run = start_run(run_id, servers, *WARM_START, COMPACT, "trainer.optimizer_steps=1", here=ended.here)
    assert run.wait() == 0, run.output()
    first, found = (json.loads((each.folder / "warm_start.json").read_text()) for each in (ended, run))
    assert found == {**first, "seconds": 0.0}
    assert (ended.folder / "logs" / "warm-start.log").exists()
    assert not (run.folder / "logs" / "warm-start.log").exists()
    assert load_config(run.folder / "config.toml").model.path == first["folder"]
    assert summary_of(run)["heldout_warm_start_best"] == summary_of(ended)["heldout_warm_start_best"]
    assert (run.folder.parent / "latest").resolve() == run.folder


@pytest.mark.parametrize(
    ("task", "cause"),
    [
        (
            "leg_counting",
            "warm_start: there are no worked answers for task 'leg_counting', only for chain_sum, gcd, spell_backward; "
            "set model.path to a model of your own",
        ),
        ("gcd", "warm_start.model.task is 'gcd', but no task of [prompts] is"),
    ],
)
def test_warm_start_that_cannot_help_is_refused(task: str, cause: str, start_run: StartRun, run_id: str) -> None:
    warm_start = f"warm_start={{examples = 8, model = {{task = '{task}'}}}}"
    run = start_run(run_id, "model.path=''", warm_start, "prompts.task=leg_counting", "prompts.task_args={}")
    assert run.wait() == 1
    assert any(line.startswith(f"problem: {cause}") for line in run.output().splitlines())
    assert not run.folder.exists()


def test_processes_of_a_shell_print_no_noise(ended: LaminarRun) -> None:
    """The command server of other tests hides what imports print."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    words = "topics tail experiences -n 1"  # other tests of this file check other commands
    command = [sys.executable, "-c", "from pipelines.cli.main import main; main()", *words.split(), "--run", NAME]
    done = subprocess.run(command, cwd=ended.here, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [NOISE.search(text) for text in (ended.output(), done.stderr)] == [None, None]


def test_run_folder_is_complete(ended: LaminarRun) -> None:
    folder = ended.folder
    config = load_config(folder / "config.toml")
    assert (config.run.name, config.run_folder) == (NAME, folder)
    assert Path(config.model.path).parent == folder.parent / "warm-starts"
    assert config.kafka.bootstrap_servers == ended.state()["bootstrap_servers"]
    for role in roles_of(config):
        log = (folder / "logs" / f"{role.name}.log").read_text()
        assert f"starting {role.name}" in log
        assert re.search(r"start 1 of \S+ from \S+.*; 0 finished in its ledger", log)
        assert "Traceback" not in log
    for file in (folder / "logs").iterdir():
        noise = re.search("Loading weights|Writing model|PartitionKey|apitools|SyntaxWarning", file.read_text())
        assert noise is None, f"{file.name}: {noise}"
    metrics = read_metrics(folder / "metrics.jsonl")
    assert [metric.step for metric in metrics if metric.name == "trainer"] == list(range(1, STEPS + 1))
    for series, names in EXPECTED_METRICS.items():
        assert set(names.split()) <= set().union(*(metric.values for metric in metrics if metric.name == series))
    assert any((folder / "tensorboard").iterdir())
    assert "<svg" in (folder / "report.html").read_text()
    assert [each["place"] for each in json.loads((folder / "samples.json").read_text())] == ["first", "middle", "last"]
    assert "<h2>Samples" in (folder / "report.html").read_text()


def test_run_files_are_private_to_their_owner(ended: LaminarRun) -> None:
    found = [ended.folder, *ended.folder.rglob("*")]
    assert {path.relative_to(ended.folder).parts[0] for path in found[1:]} >= {
        "kafka",
        "logs",
        "checkpoints",
        "model",
        "relay.secret",
    }
    modes = {path: path.lstat().st_mode for path in found if not path.is_symlink()}
    assert not [str(path) for path, mode in modes.items() if mode & 0o077]


@pytest.mark.parametrize(
    "words",
    [
        ("export", "experiences", "OUT", "--run", NAME),
        ("export", "topic", "trajectories", "OUT", "--format", "jsonl", "--run", NAME),
        ("weights", "pull", "latest", "OUT", "--run", NAME),
        ("report", NAME, "--out", "OUT"),
    ],
    ids=["export experiences", "export topic", "weights pull", "report"],
)
def test_files_that_commands_write_are_private(words: tuple[str, ...], ended: LaminarRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", "from pipelines.cli.main import main; main()"]
    command += [str(out) if word == "OUT" else word for word in words]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run(command, cwd=ended.here, env=environment, umask=COMMON_UMASK, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert out.exists()
    assert not [str(path) for path in (out, *out.rglob("*")) if path.lstat().st_mode & 0o077]


def test_run_model_and_checkpoints_load(ended: LaminarRun) -> None:
    checkpoints = list_checkpoints(ended.folder / "checkpoints")
    assert [read_position(folder).version for folder in checkpoints] == [PolicyVersion(1, 6), PolicyVersion(1, 8)]
    model = AutoModelForCausalLM.from_pretrained(ended.folder / "model", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(ended.folder / "model", local_files_only=True)
    assert model.generate(**tokenizer("1 + 1 =", return_tensors="pt"), max_new_tokens=2).shape[0] == 1


def test_checkpoint_of_an_ended_run_becomes_a_model(ended: LaminarRun, tmp_path: Path) -> None:
    """Its topics are read from the files of its stopped broker."""

    def laminar(*arguments: str) -> str:
        command = [sys.executable, "-c", "from pipelines.cli.main import main; main()", *arguments, "--run", NAME]
        path = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(
            command, cwd=ended.here, env=path, capture_output=True, text=True, check=True, timeout=120
        )
        assert "starting Apache Kafka" not in done.stderr
        assert NOISE.search(done.stderr) is None
        return done.stdout

    # In a process of their own read-only commands have no NumPy: elsewhere the tests' server has loaded it.
    for words in ("watch --plain", "topics lag", "replicas", "samples -n 1", "lineage latest"):
        assert laminar(*words.split())
    listed = {row["version"]: row["where"] for row in json.loads(laminar("weights", "list", "--json"))}
    final = [str(Path("runs", NAME, each)) for each in ("model", "checkpoints/1.8")]
    assert [listed[version] for version in ("1.0", "1.1", "1.8")] == [["initial model"], [], final]
    rows = json.loads(laminar("weights", "diff", "1.0", "1.8", "--json"))  # an initial model, and one of two places
    assert {row["share"] for row in rows} == {0.0}  # no answer is right, so nothing was learned
    assert all(row["elements"] for row in rows)
    model = ended.folder / "model"
    model.rename(tmp_path / "model")
    try:
        assert f"from {final[1]}" in laminar("weights", "pull", "latest", str(tmp_path / "converted"))
    finally:
        (tmp_path / "model").rename(model)
    weights, converted = ((each / "model.safetensors").read_bytes() for each in (model, tmp_path / "converted"))
    assert converted == weights
    AutoTokenizer.from_pretrained(tmp_path / "converted", local_files_only=True)


def test_run_command_imports_no_heavy_modules() -> None:
    code = "import sys, pipelines.run.local; print(*{'torch', 'apache_beam', 'transformers'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == ""
