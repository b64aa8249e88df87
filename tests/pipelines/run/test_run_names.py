"""The default name of a run, its folder, and the settings that may change when it resumes."""

from __future__ import annotations

import ast
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines.config import ConfigError, flattened, parse_config, save_config
from pipelines.inspect.run_folders import read_run
from pipelines.present.output import Report
from pipelines.roles import ALL_PIPELINES
from pipelines.run import local
from pipelines.run.resumable import RESUMABLE, check_resumable
from pipelines.run.run_names import name_problems, with_run_name
from pipelines.run.state import RunStateFile, runs_locked
from pipelines.run.stop_requests import StopRequests
from schemas.release import RELEASE


@pytest.mark.parametrize(
    ("file", "stem"),
    [("my_model.toml", "my-model"), ("/a/Über zwei.v2.toml", "ber-zwei-v2"), ("-.toml", "run"), ("x" * 60, "x" * 40)],
)
def test_run_is_named_after_its_configuration_file(file: str, stem: str) -> None:
    name = with_run_name(parse_config({}, "test"), Path(file)).run.name
    assert name.rpartition("-")[0].rpartition("-")[0] == stem
    assert with_run_name(parse_config({"run": {"name": "mine"}}, "test"), Path(file)).run.name == "mine"


@pytest.mark.parametrize(
    ("files", "state", "free"),
    [
        ((), {"phase": "stopped", "ended_at": 1.0}, True),
        ((), {"phase": "failed", "ended_at": 1.0, "error": "x"}, True),
        ((), {"pid": 2**22 + 1, "pid_created": 1.0}, True),
        ((), {"pid": os.getpid(), "pid_created": psutil.Process().create_time()}, False),
        (("config.toml",), {"phase": "stopped", "ended_at": 1.0}, False),
        (("submitted",), None, False),
    ],
)
def test_name_of_a_run_without_topics_is_free(
    files: tuple[str, ...], state: dict[str, Any] | None, free: bool, tmp_path: Path
) -> None:
    config = parse_config({"run": {"name": "mine", "folder": str(tmp_path)}}, "test")
    for name in ("logs", *files):
        (tmp_path / "mine" / name).mkdir(parents=True)
    if state is not None:
        (tmp_path / "mine" / "state.json").write_text(json.dumps({"release": RELEASE, "run": "mine", **state}))
    found = list(name_problems(config))
    assert [each.partition(" in ")[0] for each in found] == ["run 'mine' exists already"] * (not free)


def test_default_name_that_is_taken_gets_a_suffix(tmp_path: Path) -> None:
    config = parse_config({"run": {"folder": str(tmp_path)}}, "test")
    names = []
    for _ in range(3):
        names.append(with_run_name(config, Path("a.toml")).run.name)
        (tmp_path / names[-1]).mkdir()
    assert len({*names}) == 3


def test_second_start_leaves_the_first_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two starts with one name that both have passed its check; the first fails in the end, before its topics."""
    config = parse_config({"run": {"name": "mine", "folder": str(tmp_path)}}, "test")
    supervised = []

    def supervise(config: object, state: RunStateFile, *_: object, **__: object) -> Report:
        supervised.append(state.run)
        if len(supervised) == 1:
            with pytest.raises(ConfigError, match="run 'mine' exists already"):
                local.run_locally(*start)
            local.run_locally(*start, default_name=True)
            assert read_run(state.folder).status == "running"
            raise ConfigError("no prompts")
        return Report({}, str, as_json=True)

    start = (config, Path("a.toml"), StopRequests())
    monkeypatch.setattr(local, "_supervised", supervise)
    with pytest.raises(ConfigError, match="no prompts"):
        local.run_locally(*start)
    assert supervised == ["mine", "mine-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "mine-2"]


def test_start_waits_while_another_takes_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_supervised", lambda *_, **__: Report({}, str, as_json=True))
    config = parse_config({"run": {"name": "mine", "folder": str(tmp_path)}}, "test")
    start = threading.Thread(target=local.run_locally, args=(config, Path("a.toml"), StopRequests()))
    with runs_locked(tmp_path):
        start.start()
        start.join(0.3)
        assert not config.run_folder.exists()
    start.join()
    assert read_run(config.run_folder).status == "running"


def test_second_resume_leaves_the_first_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two resumptions that both have found the run stopped."""
    config = parse_config({"run": {"name": "mine", "folder": str(tmp_path)}}, "test")
    config.run_folder.mkdir()
    save_config(config, config.run_folder / "config.toml")
    first = RunStateFile(config.run_folder, "mine", 8)
    first.end("Ctrl-C", "stopped")
    found = read_run(first.folder)
    monkeypatch.setattr(local, "problems_of", lambda *_, **__: [])
    monkeypatch.setattr(local, "_supervised", lambda *_, resumed, **__: resumed)
    resumed: Any = local.resume_locally(found, StopRequests())
    with pytest.raises(ConfigError, match="run mine is running"):
        local.resume_locally(found, StopRequests())
    file = config.run_folder / "state.json"
    before = file.read_text().replace(f'"pid": {os.getpid()},', '"pid": 1,')  # of a third one, after its end
    file.write_text(before)
    resumed.put_back(first)
    assert file.read_text() == before


def test_resumed_run_rejects_other_settings() -> None:
    before = parse_config({}, "test")
    check_resumable(before, parse_config({"trainer": {"optimizer_steps": 90}}, "test"))
    with pytest.raises(ConfigError, match=r"trainer\.learner\.learning_rate cannot change in a resumed run"):
        check_resumable(before, parse_config({"trainer": {"learner": {"learning_rate": 0.5}}}, "test"))
    with pytest.raises(ConfigError, match="optimizer_steps = 3 is less than the run's goal of 80 steps"):
        check_resumable(before, parse_config({"trainer": {"optimizer_steps": 3}}, "test"))


def test_replaced_key_excuses_nothing_that_only_begins_like_it() -> None:
    before, after = (parse_config({"trainer": {"learner": {"learning_rate": rate}}}, "test") for rate in (0.1, 0.2))
    for replaced in ("trainer.learner", "trainer.learner.learning_rate"):
        check_resumable(before, after, [replaced])
    for replaced in ("trainer.learn", "trainer.learner.learning", "trainer.learner.learning_rate_warmup"):
        with pytest.raises(ConfigError, match=r"trainer\.learner\.learning_rate cannot change"):
            check_resumable(before, after, [replaced])


def test_resumed_run_keeps_the_shares_of_its_batches() -> None:
    before = parse_config({"trainer": {"ranks": 4}}, "test")
    with pytest.raises(ConfigError, match=r"has 4 shares, .* at most 4: set trainer\.batch_shares = 4, too"):
        check_resumable(before, parse_config({"trainer": {"ranks": 2}}, "test"))
    check_resumable(before, parse_config({"trainer": {"ranks": 2, "batch_shares": 4, "shard_ranks": 1}}, "test"))


def test_run_resumes_with_shards_of_the_buffer_up_to_its_most() -> None:
    kafka = {"partitions": 4}
    before = parse_config({"kafka": kafka, "experience": {"shards": 2, "max_shards": 3}}, "test")
    check_resumable(before, parse_config({"kafka": kafka, "experience": {"shards": 3, "max_shards": 3}}, "test"))
    fixed = parse_config({"kafka": kafka, "experience": {"shards": 2}}, "test")
    with pytest.raises(ConfigError, match=r"parts for 2 shards of the buffer, so experience\.shards is 2: a new run"):
        check_resumable(fixed, parse_config({"kafka": kafka, "experience": {"shards": 1}}, "test"))
    with pytest.raises(ConfigError, match=r"experience\.max_shards cannot change in a resumed run"):
        check_resumable(before, parse_config({"kafka": kafka, "experience": {"shards": 2}}, "test"))


BEFORE_RECORDS = {
    "autoscaling": "bounds that do not fit the inboxes",
    "deploy": "manifests",
    "kafka.client_properties": "what a host that joins has of its own",
    "kafka.partitions": "new topics",
    "kafka.replication_factor": "new topics",
    "placement.max_replicas": "bounds that do not fit the inboxes",
    "model.path": "checks of the model",
    "prompts.environment": "rewards that do not fit the prompts",
    "prompts.max_new_tokens": "the trial",
    "prompts.source": "checks of the model",
    "relay.advertise": "an address",
    "relay.token_file": "what a host that joins has of its own",
    "rollout": "the memory of a machine, and how responses are drawn",
    "score.answer": "the trial",
    "score.rewards": "rewards that do not fit the prompts",
    "trainer.device": "devices of a machine",
    "trainer.learner": "the memory of a machine",
}
"""Settings that only errors before the first record name, and what these are about."""
ADVICE = re.compile(r"\b(?:raise|set|lower|change|with) ((?:[a-z0-9_]+\.)+[a-z0-9_]+)")


def advised_settings() -> dict[str, str]:
    """The settings that texts of the product tell to change, and a file of each. The command line's examples are left
    out."""
    known, found = flattened(parse_config({}, "test")), {}
    for folder in ("infra", "operators", "pipelines/run"):
        for file in Path(folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found |= {key: str(file) for key in ADVICE.findall(node.value) if key in known}
    return found


def test_resumed_run_takes_the_settings_that_errors_name() -> None:
    advised = advised_settings()
    assert {"trainer.lost_batches", "kafka.transaction_timeout_s", "trainer.learner.max_skipped_batches"} <= set(
        advised
    )
    before = parse_config({}, "test")
    budgets = [key for role in ALL_PIPELINES for key in before.progress.budget(role).setting.split(" or ")]
    refused = {
        key: advised.get(key, "infra/runners/liveness.py")
        for key in (*advised, *budgets, "trainer.checkpoint_tries", "trainer.collective_timeout_s")
        if key not in RESUMABLE and not any(key == each or key.startswith(f"{each}.") for each in BEFORE_RECORDS)
    }
    assert refused == {}
    changes = ["progress.trainer_s=9000", "kafka.transaction_timeout_s=99", "trainer.lost_batches=[7]"]
    check_resumable(before, parse_config({}, "test", changes))
