"""A full disk, a deleted run folder, deleted topics: each ends a run with an error that names the cause."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from small_disk import fill, small_disk
from waiting import until

from infra.files import is_full, write_even_if_disk_full
from infra.kafka.admin import TopicSpec, admin_client, create_topics, delete_topics
from infra.kafka.broker import Broker, BrokerConfig, BrokerStartError
from pipelines.config import KafkaConfig, load_config
from pipelines.inspect.run_files import CONFIG_FILE, STATE_FILE
from pipelines.inspect.run_folders import read_run
from pipelines.inspect.submissions import Submission, read_submission
from pipelines.present.view.live import LiveView
from pipelines.run.held_folder import RunFolderDeleted
from pipelines.run.local import _end_failed
from pipelines.run.run_kafka import BrokerDataDeleted, BrokerDiskFull, RunKafka, TopicsDeleted
from pipelines.run.state import RunStateFile
from pipelines.run.stop_requests import StopRequests
from pipelines.run.supervisor import Supervisor

EXAMPLE = Path(__file__).parents[3] / "examples" / "chain_sum.toml"


def test_end_failed_reports_a_full_disk_in_state_json(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 256) as disk:
        folder = disk / "first"
        folder.mkdir()
        state = RunStateFile(folder, "first", 8)
        state.write()
        (folder / CONFIG_FILE).write_text("")
        fill(disk)
        with pytest.raises(OSError, match="No space left") as raised:
            (folder / "more").write_text("x" * 100_000)
        _end_failed(state, raised.value)
        run = read_run(folder)
        assert run.status == "failed"
        assert f"0 of 262,144 bytes are free on the disk of {folder}" in str(run.state["error"])
        assert raised.value.__notes__[-1].endswith(f"runs resume --run {folder}`")


def test_end_failed_names_the_resume_without_a_broker(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    folder.mkdir()
    state = RunStateFile(folder, "first", 8)
    state.write()
    (folder / CONFIG_FILE).write_text("")
    error = BrokerStartError("the broker has failed 6 times")
    _end_failed(state, error)
    assert "the broker has failed 6 times" in str(read_run(folder).state["error"])
    assert error.__notes__[-1].endswith(f"runs resume --run {folder}`")


def test_run_kafka_does_not_restart_a_broker_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 256) as disk:
        kafka = RunKafka(KafkaConfig(), disk, lambda line: None)
        kafka._own = Broker(BrokerConfig(disk))  # without a process
        (disk / "log").mkdir()
        (disk / "log" / "meta.properties").write_text("")
        full = rf"disk is full, .* free on the disk of {disk}: .*broker\.log"
        with pytest.raises(BrokerDiskFull, match=full) as raised:
            kafka.poll()
        _end_failed(RunStateFile(disk, "first", 8), raised.value)
        assert not hasattr(raised.value, "__notes__"), "the message says it"


def test_write_anyway_keeps_the_file_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        file = disk / "state.json"
        write_even_if_disk_full(file, json.dumps({"a": 1}))
        fill(disk)
        with pytest.raises(OSError, match="No space left") as raised:
            write_even_if_disk_full(file, json.dumps("x" * 10_000))
        assert raised.value.errno == errno.ENOSPC
        assert json.loads(file.read_text()) == {"a": 1}
        write_even_if_disk_full(file, json.dumps("y" * 4_000))
        assert json.loads(file.read_text()) == "y" * 4_000
        assert sorted(path.name for path in disk.iterdir()) == ["filler", "state.json"]
        assert is_full(disk)


def test_submission_is_written_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 128) as disk:
        (disk / "submitted").mkdir()
        submission = Submission(disk, "score", 0, "embedded", worker=1)
        submission.write()
        fill(disk)
        replace(submission, state="failed", error="no space left").write()
        assert read_submission(submission.file).error == "no space left"


def test_end_failed_keeps_the_error_without_a_folder(tmp_path: Path) -> None:
    error = RuntimeError("the cause")
    _end_failed(RunStateFile(tmp_path / "gone", "gone", 8), error)
    assert "could not be written" in error.__notes__[0]


def test_end_failed_names_no_resume_of_a_lost_run(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    state = RunStateFile(tmp_path / "first", "first", 8)
    (tmp_path / "first" / CONFIG_FILE).write_text("")
    for where in state, RunStateFile(tmp_path / "gone", "gone", 8):
        error = TopicsDeleted("its topics are gone: start a new run")
        _end_failed(where, error)
        assert getattr(error, "__notes__", []) == []
    assert "its topics are gone" in str(read_run(tmp_path / "first").state["error"])


@pytest.mark.parametrize("made_again", [False, True], ids=["gone", "made again"])
def test_supervisor_fails_when_the_run_folder_is_deleted(tmp_path: Path, made_again: bool) -> None:
    """A role may have created it again to report that it is alive."""
    config = load_config(EXAMPLE, ["run.name=gone", f"run.folder={tmp_path}"])
    config.run_folder.mkdir()
    state = RunStateFile(config.run_folder, "gone", 8)
    with LiveView(Console(file=StringIO()), "gone", 8) as view, StopRequests() as stops:
        supervisor = Supervisor(config, view, state, stops)
        shutil.rmtree(config.run_folder)
        if made_again:
            (config.run_folder / "alive").mkdir(parents=True)
        with pytest.raises(RunFolderDeleted, match=f"folder {config.run_folder} has been deleted"):
            supervisor._tick()


def test_run_kafka_fails_when_topics_are_deleted(broker: Broker, run_id: str, tmp_path: Path) -> None:
    names = [f"{run_id}-{each}" for each in ("kept", "gone")]
    with admin_client(broker.client()) as admin:
        create_topics(admin, [TopicSpec(name, 1) for name in names])
        kafka = RunKafka(KafkaConfig(broker.bootstrap_servers), tmp_path / "kafka", lambda line: None)
        kafka.start()
        kafka.topics = frozenset(names)
        until(kafka.answers)
        until(kafka.answers)
        delete_topics(admin, names[1])
    until(kafka.answers)  # a starting broker may not list all topics yet
    with pytest.raises(TopicsDeleted, match=rf"deleted from Kafka at {broker.bootstrap_servers}: {names[1]}\. "):
        until(lambda: kafka.answers() is None)  # never: a busy broker may not answer the first time


def test_run_kafka_fails_when_broker_data_is_deleted(tmp_path: Path) -> None:
    kafka = RunKafka(KafkaConfig(), tmp_path / "kafka", lambda line: None)
    kafka.start()
    try:
        assert kafka._own is not None
        kafka._own.kill()
        shutil.rmtree(tmp_path / "kafka")
        with pytest.raises(BrokerDataDeleted, match=r"data in .*kafka has been deleted"):
            kafka.poll()
    finally:
        kafka.close()


def test_read_run_names_the_remedy_for_damaged_state_json(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / STATE_FILE).write_text("{")
    with pytest.raises(ValueError, match=rf"state\.json is not JSON: .*`.*laminar runs resume --run {tmp_path}/bad`"):
        read_run(tmp_path / "bad")
