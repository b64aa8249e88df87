"""An emulated run: real Kafka and pipelines; engines and trainer only simulate their durations."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
from kafka import KafkaProducer
from laminar_runs import REPOSITORY, Command, CommandServer, LaminarRun
from small_runs import EMULATED

from infra.kafka.admin import admin_client, list_topics
from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from pipelines.config import load_config
from pipelines.inspect.metrics_file import read_metrics
from pipelines.inspect.run_files import STATE_FILE
from pipelines.present.report.series import batches
from pipelines.present.view.metric_texts import TEXTS
from pipelines.run.state import link_latest
from schemas.codec import encode
from schemas.metric_labels import split_labels
from schemas.records import Settled
from schemas.topics import SETTLED, run_prefix

NAME = f"emulated-run-{os.getpid()}"
WATCHED: list[str] = []
"""What `laminar watch` has printed, started before the run had topics."""
STEPS = EMULATED["trainer"]["optimizer_steps"]


@pytest.fixture(scope="module")
def ended(command_server: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaminarRun]:
    here = tmp_path_factory.mktemp("here")
    config = here / "emulated.toml"
    config.write_text(tomli_w.dumps(EMULATED))
    run = LaminarRun(command_server, here, config, NAME)
    try:
        run.until(run.state, 60, "its state")
        run.signal(signal.SIGSTOP)  # it makes no topics before the watch has seen that there are none
        watch = Command(command_server, here / "elsewhere", "watch", "--plain", "--run", str(run.folder))
        watch.until(watch.output, 60, "its first line")
        run.signal(signal.SIGCONT)
        assert watch.wait() == 0, watch.output()
        WATCHED.append(watch.output())
        run.wait(120)
        yield run
    finally:
        run.clean_up()


def test_emulated_run_reaches_its_goal_and_passes_the_audit(ended: LaminarRun) -> None:
    assert ended.exit_code() == 0, ended.output()
    audit = ended.audit()
    assert audit["passed"]
    assert (audit["trained"], audit["lost"], audit["trained_twice"]) == (STEPS * 32, 0, 0)
    assert ended.leftovers() == []


def test_watch_waits_for_the_topics_of_a_starting_run(ended: LaminarRun) -> None:
    (watched,) = WATCHED
    assert f"waiting for the topics of run {NAME}, which is starting: " in watched


def test_every_metric_of_the_run_has_a_help_text(ended: LaminarRun) -> None:
    for metric in read_metrics(ended.folder / "metrics.jsonl"):
        stage = metric.name.partition("/")[0]
        names = {split_labels(key)[0] for key in metric.values} if stage in TEXTS else ()
        for name in names:
            kind = name.partition("/")[0]
            assert {name, f"{kind}/", kind if stage == "steps" else name} & TEXTS[stage].keys(), (stage, name)


def test_emulated_steps_take_their_configured_time(ended: LaminarRun) -> None:
    trained = batches(read_metrics(ended.folder / "metrics.jsonl"))
    assert [each.step for each in trained] == list(range(1, STEPS + 1))
    for each in trained:
        assert each.values["time/update"] * 100 == pytest.approx(10 + 8 * each.values["tokens"] / 10_000, rel=1e-6)


def test_emulated_run_needs_no_model_relay_or_torch(ended: LaminarRun) -> None:
    assert set(ended.state()["roles"]) == {"light", "rollout-0", "trainer"}
    assert not (ended.folder / "model").exists()
    assert load_config(ended.folder / "config.toml").emulated
    assert "<svg" in (ended.folder / "report.html").read_text()
    assert f"Report: runs/{NAME}/report.html (open it in a browser)" in ended.output()


def test_emulated_run_uses_every_replica(ended: LaminarRun) -> None:
    metrics = read_metrics(ended.folder / "metrics.jsonl")
    worked = {each.step for each in metrics if each.name == "replica" and each.values["tokens_generated"]}
    assert worked == {0, 1, 2, 3}


def test_export_of_a_run_that_stops_reads_the_rest_from_its_log(
    command_server: CommandServer, emulated_config: Path, tmp_path: Path
) -> None:
    """It shows its progress on a terminal, and prints one JSON document with --json. Another run may start and end."""
    run = LaminarRun(command_server, tmp_path, emulated_config, "stopped", "trainer.optimizer_steps=100000")
    main, side = os.openpty()
    words = ("export", "experiences", "rows")
    shown = ""

    def has_shown(text: str) -> bool:
        nonlocal shown
        while select.select([main], [], [], 0)[0]:
            shown += os.read(main, 65536).decode()
        return text in shown

    try:
        run.until_phase("training")
        export = Command(command_server, tmp_path, *words, "--follow", output=Path(os.ttyname(side)))
        run.until(lambda: has_shown("start 1 of ") and has_shown(" rows so far ("), 60, "progress of the export")
        other = run.folder.with_name("other")
        (other / "kafka").mkdir(parents=True)
        (other / STATE_FILE).write_text(json.dumps({**run.state(), "run": "other", "ended_at": 1.0}))
        link_latest(other)
        run.signal(signal.SIGINT)
        run.wait()
        assert export.wait(60) == 0, shown
        assert has_shown("exports experiences to rows: "), shown
        assert has_shown("the run has ended, and its broker with it: the rest is read from the files of its log"), shown
        again = Command(command_server, tmp_path, *words, "--run", "stopped", "--json", output=tmp_path / "again.txt")
        assert again.wait() == 0
        assert json.loads(again.output())["rows"] > 0, "nothing beside the document"
        verification = Command(command_server, tmp_path, "export", "verify", "rows", "--log", output=tmp_path / "v.txt")
        assert verification.wait() == 0, verification.output()
    finally:
        run.clean_up()
        os.close(main)
        os.close(side)


@pytest.mark.slow
def test_run_exits_with_1_if_the_audit_fails(
    command_server: CommandServer, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    config = tmp_path / "emulated.toml"
    kafka = {"bootstrap_servers": broker.bootstrap_servers}
    trainer = {"optimizer_steps": 1, "emulation": {"step_s": [[0, 200], [100_000, 200]]}}
    config.write_text(tomli_w.dumps({**EMULATED, "kafka": kafka, "trainer": trainer}))
    value, headers = encode(Settled("p999999.0", 4, "batched", "", 0, 0, 1, 0))  # no batch will contain it
    with KafkaProducer(bootstrap_servers=broker.bootstrap_servers) as producer:  # connected before the run may end
        run = LaminarRun(command_server, tmp_path, config, run_id)
        try:
            run.pid_of("light")  # the topics exist by then
            producer.send(SETTLED.name(run_id), value, headers=list(headers), partition=0).get(10)
            assert run.wait() == 1
        finally:
            run.clean_up()
    assert run.audit()["named"]["lost"] == [{"trajectory_id": "p999999.0", "stage": "experience"}]
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["reached"], summary["audit_passed"], summary["lost"]) == (True, False, 1)
    assert "The audit FAILED: 1 lost" in run.output()
    with admin_client(ClientProperties.at(broker.bootstrap_servers)) as admin:
        assert list_topics(admin, run_prefix(run_id))
        words = ("runs", "delete", run_id, "--topics", "--yes")
        deletion = Command(command_server, tmp_path, *words, output=tmp_path / "deletion.txt")
        assert deletion.wait() == 0, deletion.output()
        assert list_topics(admin, run_prefix(run_id)) == []
    assert not run.folder.exists()
    assert f"deleted {run_id}: " in deletion.output()


def test_emulated_zygote_imports_no_torch() -> None:
    """And conversions of pyarrow import no pandas, which each role would do for itself."""
    code = (
        "import sys; from pipelines.run.zygote import import_role_modules; from pipelines.roles import EMULATED;"
        "import_role_modules(EMULATED); import pyarrow; pyarrow.array([[1]]).to_pylist();"
        "print(*{'torch', 'transformers', 'reasoning_gym', 'pandas'} & set(sys.modules));"
        "assert len(pyarrow.table({'x': [1]}).to_pandas()) == 1"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.strip() == ""
