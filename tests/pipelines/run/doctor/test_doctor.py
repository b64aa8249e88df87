"""`laminar doctor`: checks of described machines, and the observation of this one."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from infra.kafka.broker import Broker
from infra.kafka.settings_check import CLUSTER, SettingProblem
from infra.sizes import GIB
from infra.store.errors import StoreError
from infra.store.ownership import StaleStore, open_folder, stale_stores
from pipelines.cli.main import main
from pipelines.inspect.run_folders import laminar_command
from pipelines.run.doctor import machine
from pipelines.run.doctor.checks import can_run, judge
from pipelines.run.doctor.machine import Machine, Package, observe, remove_stale_stores

COMPLETE = Machine(
    python=(3, 11, 7),
    packages=(Package("torch>=2", "2.1", True),),
    java=Path("/java"),
    broker_jars=True,
    kafka_version="4.3.1",
    prism=Path("/prism"),
    go=None,
    gpus=("H200, 143771 MiB",),
    cuda=True,
    vllm="1.0",
    shared_memory=8 * GIB,
    stale_stores=(),
    disk_free=50 * GIB,
    memory=32 * GIB,
    cores=16,
    broker=None,
)


def test_judge_finds_nothing_missing_on_a_complete_machine() -> None:
    findings = judge(COMPLETE)
    assert {finding.verdict for finding in findings} == {"ok"}
    assert not any(finding.fix for finding in findings)


@pytest.mark.parametrize(
    ("change", "name", "verdict", "detail"),
    [
        ({"python": (3, 10, 9)}, "python", "missing", "3.10.9 is older than 3.11"),
        ({"packages": (Package("torch>=2", None, False),)}, "packages", "missing", "torch>=2: not installed"),
        ({"packages": (Package("torch>=2", "1.9", False),)}, "packages", "missing", "torch>=2: 1.9 is installed"),
        ({"java": None}, "kafka", "missing", "no Java"),
        ({"broker_jars": False}, "kafka", "limited", "4.3.1 are not installed yet"),
        ({"broker": "a:1: Connection refused", "java": None}, "kafka", "missing", "Connection refused"),
        ({"prism": None}, "prism", "limited", "nor Go"),
        ({"prism": None, "go": Path("/go")}, "prism", "limited", "not built yet"),
        ({"gpus": ()}, "gpu", "limited", "CPU"),
        ({"cuda": False}, "gpu", "limited", "torch cannot use it"),
        ({"vllm": None}, "vllm", "limited", "built-in engine"),
        ({"shared_memory": None}, "shared memory", "limited", "cannot be written"),
        ({"shared_memory": 64 << 20}, "shared memory", "limited", "64.0 MiB"),
        (
            {"stale_stores": (StaleStore(Path("/s"), GIB, None),)},
            "stale store",
            "limited",
            "/s uses 1.0 GiB and no process uses it; last opened by: unknown",
        ),
        ({"disk_free": GIB // 2}, "disk", "missing", "0.5 GiB free"),
        ({"memory": 2 * GIB}, "memory", "missing", "2.0 GiB, 3.0 GiB needed"),
        ({"cores": 2}, "cores", "limited", "share them"),
    ],
)
def test_judge_reports_a_defect_with_its_fix(change: dict[str, object], name: str, verdict: str, detail: str) -> None:
    findings = judge(replace(COMPLETE, **change))
    (wrong,) = (finding for finding in findings if finding.verdict != "ok")
    assert (wrong.name, wrong.verdict) == (name, verdict)
    assert detail in wrong.detail
    assert wrong.fix
    assert can_run(findings) is (verdict != "missing")


def test_judge_advises_vllm_of_a_supported_version() -> None:
    (wrong,) = [each for each in judge(replace(COMPLETE, vllm=None)) if each.name == "vllm"]
    assert "pip install '.[vllm]'" in wrong.fix


@pytest.mark.parametrize(
    ("where", "fatal", "verdict"),
    [("broker 1", True, "missing"), ("broker 1", False, "limited"), ("laminar.old.settled", True, "limited")],
)
def test_judge_reports_settings_that_lose_records(where: str, fatal: bool, verdict: str) -> None:
    problem = SettingProblem(where, "retention.ms", "1", "-1", "records would go", fatal)
    (finding,) = [each for each in judge(replace(COMPLETE, broker="", settings=(problem,))) if each.fix]
    assert (finding.name, finding.verdict) == ("kafka settings", verdict)
    place = "in server.properties" if where == "broker 1" else "with kafka-configs.sh --alter"
    assert finding.fix == f"change retention.ms {place}: -1"


def test_judge_advises_kafka_acls_for_a_missing_permission() -> None:
    problem = SettingProblem(CLUSTER, "the permission DescribeConfigs", "not granted", "granted", "denied", fatal=False)
    (finding,) = [each for each in judge(replace(COMPLETE, broker="", settings=(problem,))) if each.fix]
    assert finding.fix == "change the permission DescribeConfigs with kafka-acls.sh --add: granted"


def test_judge_of_a_configuration_stops_for_its_topics() -> None:
    problem = SettingProblem("laminar.first.settled", "retention.ms", "1", "-1", "records would go")
    machine = replace(COMPLETE, broker="", settings=(problem,), run="first", topics=("they have 2 partitions",))
    wrong = [(each.name, each.detail) for each in judge(machine) if each.verdict == "missing"]
    assert wrong == [("kafka topics", "they have 2 partitions"), ("kafka settings", str(problem))]


def test_judge_needs_no_java_for_a_remote_broker() -> None:
    assert can_run(judge(replace(COMPLETE, java=None, broker_jars=False, broker="")))


def test_fixes_are_valid_shell_commands() -> None:
    incomplete = replace(COMPLETE, packages=(Package("kafka-python[lz4]>=3", None, False),), prism=None, go=Path("/go"))
    fixes = [finding.fix for finding in judge(incomplete) if finding.fix]
    assert shlex.split(fixes[0]) == ["pip", "install", "kafka-python[lz4]>=3"]
    assert "make prism" in fixes[1]


def test_observe_describes_this_machine() -> None:
    machine = observe()
    assert {"pyarrow", "torch"} <= {package.requirement.split("<")[0].split(">")[0] for package in machine.packages}
    assert all(package.fits for package in machine.packages)
    assert machine.java is not None
    assert machine.cores >= 1
    assert bool(machine.gpus) == (machine.cuda is not None)
    assert machine.broker is None


def test_remove_stale_stores_keeps_stores_in_use(tmp_path: Path) -> None:
    used, stale, other = tmp_path / "laminar-used", tmp_path / "laminar-stale", tmp_path / "laminar-not-a-store"
    lock = open_folder(used)
    open_folder(stale).release()
    other.mkdir()
    with pytest.raises(StoreError, match=r"laminar-used is not an unused store of yours: `.*laminar doctor` lists"):
        remove_stale_stores(["laminar-used", "laminar-stale"], tmp_path)
    assert remove_stale_stores(base=tmp_path) == [stale]
    assert sorted(tmp_path.iterdir()) == [other, used]
    lock.release()
    shutil.rmtree(used)


def test_judge_offers_each_stale_store_of_a_user_for_itself(tmp_path: Path) -> None:
    for run in ("one", "two"):
        open_folder(tmp_path / f"laminar-{run}", tmp_path / "runs" / run).release()
    findings = judge(replace(COMPLETE, stale_stores=tuple(stale_stores(tmp_path))))
    one, two = (finding for finding in findings if finding.verdict != "ok")
    assert one.detail.endswith(f", of the run in {tmp_path}/runs/one")
    assert two.fix == f"{laminar_command()} doctor --clean laminar-two"
    assert remove_stale_stores(["laminar-two"], tmp_path) == [tmp_path / "laminar-two"]
    assert [each.root for each in stale_stores(tmp_path)] == [tmp_path / "laminar-one"]


def test_remove_stale_stores_keeps_one_opened_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_folder(tmp_path / "laminar-a").release()
    found = tuple(stale_stores(tmp_path))
    monkeypatch.setattr(machine, "stale_stores", lambda base: found)
    lock = open_folder(tmp_path / "laminar-a")
    assert remove_stale_stores(base=tmp_path) == []
    lock.release()


def laminar(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(["doctor", *arguments])
    return int(exit_info.value.code or 0)


def test_doctor_command_reports_whether_a_run_can_work(broker: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    assert laminar("-b", broker.bootstrap_servers) == 0
    printed = capsys.readouterr().out
    assert "laminar run can work here" in printed
    checked = r"the broker answers; checked: broker \d+: transaction.max.timeout.ms = \d+, log.cleaner.enable = true"
    assert re.search(checked, printed)
    assert laminar("-b", "127.0.0.1:1", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert laminar("laminar-a") == 1
    expected = "laminar-a is not a configuration file; stores are named with --clean, which removes them"
    assert expected in capsys.readouterr().err
    assert laminar("--clean", "--set", "run.name=a") == 2
    assert "it changes a setting of CONFIG.toml, and --clean takes none" in capsys.readouterr().err
    assert report["can_run"] is False
    assert [finding["name"] for finding in report["findings"] if finding["verdict"] == "missing"] == ["kafka"]
