"""Fixtures that tests of more than one folder share: one real Kafka broker a session, a run name, the Beam runners."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import temporary_folder
from hypothesis import HealthCheck, settings

from infra.kafka.broker import Broker, BrokerConfig, start_broker
from infra.runners.options import RunnerName
from infra.runners.prism import find_prism
from infra.sandbox.run import SandboxUnavailable, run_python
from infra.sandbox.zygotes import ZYGOTES

_run_numbers = itertools.count(1)
# An example may take any time: the machine may do other work.
settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")
# A background job or `nohup` ignores signals, and so would every process that a test starts and stops by one.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="files, and the tests within each, in random order")


SHORT = [Path(__file__).parent / name for name in ("schemas", "operators/placement", "pipelines/present")]
"""Folders whose files take a few seconds at most. They are last, so that all workers end at about the same time."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Short files last; shuffle where asked to. Tests of a file stay together: they share what is made once a file."""
    items.sort(key=lambda item: any(folder in item.path.parents for folder in SHORT))
    seed = config.getoption("--shuffle")
    if seed is not None:
        rng = random.Random(seed)  # the same in each worker
        files: dict[object, list[pytest.Item]] = {}
        for item in items:
            files.setdefault(item.path, []).append(item)
        groups = list(files.values())
        rng.shuffle(groups)
        for group in groups:
            rng.shuffle(group)
        items[:] = [item for group in groups for item in group]


def pytest_collection_finish() -> None:
    """Imported modules and collected tests stay: garbage collections, also those of forks, need not visit them."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else triton reports at the exit that its objects are left


def pytest_configure(config: pytest.Config) -> None:
    """Let pass a warning that is kafka-python's own; every other warning stays an error.

    Its import uses a deprecated way to read its resources.
    """
    temporary_folder.register(config)
    for module in (r"kafka\.protocol\.schemas\.load_json", r"importlib\.resources\._legacy"):
        for function in ("read_text", "open_text"):
            config.addinivalue_line("filterwarnings", f"ignore:{function} is deprecated:DeprecationWarning:{module}")


@pytest.fixture(scope="session", autouse=True)
def _no_zygote_is_left() -> Iterator[None]:
    yield
    ZYGOTES.close()


@pytest.fixture(scope="session")
def killed_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The temporary directory of programs that tests kill, which cannot remove their files; removed at the end.

    It is an error if a file is left that the next start of the program would not remove.
    """
    folder = tmp_path_factory.mktemp("killed")
    yield folder
    left = temporary_folder.unexpected_in(folder, (*temporary_folder.CACHES, *temporary_folder.REMOVED_LATER))
    shutil.rmtree(folder, ignore_errors=True)
    assert not left, "programs left these in their temporary directory, and nothing removes them"


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Commands that a test calls in its own process configure the logging of the process: only until the test ends."""
    loggers = [logging.getLogger(name) for name in (None, "kafka", "apache_beam")]
    levels, handlers = [logger.level for logger in loggers], list(loggers[0].handlers)
    disabled = loggers[0].manager.disable
    yield
    logging.disable(disabled)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    loggers[0].handlers[:] = handlers


@pytest.fixture(scope="module")
def killed_programs(killed_folder: Path) -> Iterator[None]:
    """For modules that kill programs: the programs that they start have `killed_folder` as temporary directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(killed_folder))
        yield


@pytest.fixture(scope="session")
def confined() -> None:
    """For tests that run programs in the sandbox: they are skipped where the kernel lacks one of its layers."""
    try:
        run_python("")
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A running Apache Kafka on a free port; `broker.bootstrap_servers` is its address. Shared: do not stop it.

    Its bound on transactions is Kafka's default, as a user's own Kafka has it.
    """
    default = {"transaction.max.timeout.ms": "900000"}
    with start_broker(BrokerConfig(tmp_path_factory.mktemp("kafka"), overrides=default)) as running:
        yield running


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> str:
    """A run name that no other test of this session has, so that tests share the broker but no topic."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:40].strip("-")
    return f"{name}-{next(_run_numbers)}"


@pytest.fixture(scope="module", params=["embedded", "prism", "flink"])
def runner(request: pytest.FixtureRequest) -> RunnerName:
    """Each runner that pipelines can be tested on: the embedded one, Prism where its binary is, Flink where asked."""
    if request.param == "flink" and not os.environ.get("LAMINAR_TEST_FLINK"):
        pytest.skip("make flink-test has it")
    if request.param == "prism" and find_prism() is None:
        pytest.skip("no Prism is found: `make prism` builds it, with Go")
    return request.param
