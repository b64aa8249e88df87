"""The verifier pool: a bad verifier fails one call, and the pool leaves nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.workers.error_text import MAX_TRACE_CHARACTERS
from infra.workers.pool import WorkersUnavailable
from infra.workers.process import ProcessEnded, WorkerProcess
from operators.score.pool import VerifierCall, VerifierPool, VerifierUnavailable, result_of
from operators.score.worker import MAX_REPLY_BYTES

BAD_VERIFIERS = """
import os, re, signal, subprocess, sys, threading, time

def good(text): return float(len(text))
def sleeps(text): time.sleep(60)
def spins(text): return re.match("(a+)+$", "a" * 60 + "b") is None
def stops_itself(text): os.kill(os.getpid(), signal.SIGSTOP)
def raises(text): raise KeyError("no such thing")
def raises_unspeakably(text): raise Unspeakable
def raises_at_length(text): raise ValueError("x" * 10_000_000)
def leaves(text): sys.exit(3)
def vanishes(text): os._exit(3)
def crashes(text): os.kill(os.getpid(), signal.SIGSEGV)
def eats_memory(text): return len(bytearray(10**10))
def recurses(text): return recurses(text)
def prints_without_end(text):
    while True:
        os.write(1, b"x" * 65536)
def writes_without_end(text):
    with open(text, "wb") as file:
        while True:
            file.write(b"x" * 65536)
            file.flush()
def floods_replies(text):
    for descriptor in range(3, 30):
        try:
            os.write(descriptor, b"x" * 65536)
        except OSError:
            pass
def forges_a_reply(text):
    for descriptor in range(3, 30):
        try:
            os.write(descriptor, bytes([0, 0, 0, 22]) + b'{"value":7.0,"call":0}')
        except OSError:
            pass
    time.sleep(60)
def closes_replies(text):
    os.closerange(3, 30)
    time.sleep(60)
def forks(text): return os.fork()
def starts_a_process(text): return subprocess.call(["true"])
def gives_nothing(text): return None
def gives_text(text): return "1.0"
def gives_nan(text): return float("nan")
def gives_infinity(text): return 10**400
def leaves_a_child_and_hangs(text):
    with open(text, "w") as file:
        file.write(str(subprocess.Popen(["sleep", "60"]).pid))
    time.sleep(60)
def leaves_a_thread(text):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return 5.0
def sees_a_secret(text): return float(text in os.environ)
def waits_for_another(text):
    open(os.path.join(text, str(os.getpid())), "w").close()
    while len(os.listdir(text)) < 2:
        time.sleep(0.01)
    return 2.0
def fits_memory(text): return float(len(bytearray(10**8)) > 0)

class Unspeakable(Exception):
    def __str__(self): raise RuntimeError
"""


@pytest.fixture
def open_pool(tmp_path: Path) -> Callable[..., VerifierPool]:
    """Opens a pool of functions of `BAD_VERIFIERS`."""
    path = tmp_path / "verifiers.py"
    path.write_text(BAD_VERIFIERS)

    def opened(*names: str, workers: int = 1, time_limit_s: float = 30.0, **setup: object) -> VerifierPool:
        rewards = [{"name": f"{path}:{name}", "options": {}, "extraction": ("whole", "")} for name in names]
        limits = {"memory_limit_mb": 512, "allow_processes": False}
        return VerifierPool({"rewards": rewards, **limits, **setup}, workers, time_limit_s)

    return opened


def call(reward: int, text: str = "four") -> VerifierCall:
    return VerifierCall(reward, {"text": text, "tokens": len(text), "prompt": "", "task": "", "reference": "{}"})


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(done: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.01)
    return done()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("raises", "KeyError: 'no such thing' (verifiers.py:"),
        ("raises_unspeakably", "Unspeakable: its message cannot be read: RuntimeError"),
        ("raises_at_length", "ValueError: xxx"),
        ("leaves", "SystemExit: 3"),
        ("vanishes", "exit status 3"),
        ("crashes", "died of SIGSEGV"),
        ("eats_memory", "MemoryError"),
        ("recurses", "RecursionError"),
        ("floods_replies", "wrote into the reply channel"),
        ("forges_a_reply", "wrote into the reply channel"),
        ("closes_replies", "died of SIGKILL"),
        ("forks", "must not start processes"),
        ("starts_a_process", "must not start processes"),
        ("gives_nothing", "returned NoneType instead of a number"),
        ("gives_text", "returned str instead of a number"),
        ("gives_nan", "returned nan"),
        ("gives_infinity", "OverflowError"),
    ],
)
def test_bad_verifier_fails_one_call(open_pool: Callable[..., VerifierPool], name: str, error: str) -> None:
    with open_pool("good", name) as pool:
        results = pool.score_all([call(0), call(1), call(0, "seven77"), call(0)])
    assert [result.value for result in results] == [4.0, None, 7.0, 4.0]
    assert error in (results[1].error or "")
    assert len(results[1].error or "") < 600 + MAX_TRACE_CHARACTERS


def test_verifiers_that_do_not_end_fail_one_call_each(open_pool: Callable[..., VerifierPool]) -> None:
    """At once: the limit is long, since it is that of the good calls, too."""
    names = ("sleeps", "spins", "stops_itself", "prints_without_end")
    with open_pool("good", *names, workers=len(names), time_limit_s=10.0) as pool:
        results = pool.score_all([*map(call, range(len(names) + 1)), *(call(0, "seven77") for _ in names)])
    assert [result.value for result in results] == [4.0, *[None] * len(names), *[7.0] * len(names)]
    assert [result.error for result in results if result.error] == ["the verifier took longer than 10 s"] * len(names)


def test_values_without_a_mean_are_an_error() -> None:
    assert result_of([1.7e308, 1.7e308]).error == "returned [1.7e+308, 1.7e+308]: intermediate overflow in fsum"


def test_last_reply_of_an_ended_process_is_received(tmp_path: Path) -> None:
    (tmp_path / "verifiers.py").write_text(BAD_VERIFIERS)
    setup = {
        "rewards": [{"name": f"{tmp_path / 'verifiers.py'}:eats_memory", "options": {}, "extraction": ["whole", ""]}],
        "memory_limit_mb": 512, "allow_processes": False, "time_limit_s": 30.0,
    }  # fmt: skip
    closing, close = os.pipe()
    process = WorkerProcess("operators.score.worker", setup, MAX_REPLY_BYTES, "verifier")
    try:
        assert process.reply(60.0, closing)["ready"]
        process.begin(1, {"reward": 0, "attempt": call(0).attempt})
        assert "MemoryError" in process.reply(60.0, closing)["error"]
        with pytest.raises(ProcessEnded):
            process.reply(60.0, closing)  # it retires after a MemoryError
    finally:
        process.kill()
        os.close(close)
        os.close(closing)


def test_verifier_file_size_is_limited(open_pool: Callable[..., VerifierPool], tmp_path: Path) -> None:
    with open_pool("writes_without_end") as pool:
        (result,) = pool.score_all([call(0, str(tmp_path / "large"))])
    assert "OSError" in (result.error or "") or "SIGXFSZ" in (result.error or "")
    assert (tmp_path / "large").stat().st_size <= 16 * 1024 * 1024


def test_verifier_may_use_memory_within_the_limit(open_pool: Callable[..., VerifierPool]) -> None:
    with open_pool("fits_memory") as pool:
        assert pool.score_all([call(0)])[0].value == 1.0


def test_child_processes_need_permission_and_end_with_verifiers(
    open_pool: Callable[..., VerifierPool], tmp_path: Path
) -> None:
    names = ("starts_a_process", "leaves_a_child_and_hangs")
    with open_pool(*names, allow_processes=True, time_limit_s=10.0) as pool:
        started, hung = pool.score_all([call(0), call(1, str(tmp_path / "pid"))])
    assert started.value == 0.0
    assert "took longer" in (hung.error or "")
    child = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not running(child))


def test_pool_keeps_order_and_uses_all_workers(open_pool: Callable[..., VerifierPool], tmp_path: Path) -> None:
    """The first call and the last return only once both have begun, each in a process of its own."""
    (tmp_path / "begun").mkdir()
    both = call(1, str(tmp_path / "begun"))
    with open_pool("good", "waits_for_another", workers=2, time_limit_s=60.0) as pool:
        results = pool.score_all([both, *(call(0, "x" * n) for n in range(20)), both])
        assert [result.value for result in results] == [2.0, *map(float, range(20)), 2.0]
        assert pool.score_all([]) == []


def test_pool_sends_requests_larger_than_a_pipe(open_pool: Callable[..., VerifierPool]) -> None:
    with open_pool("good", workers=2) as pool:
        results = pool.score_all([call(0, "x" * 1_000_000), call(0, "é" * 300_000), call(0)])
    assert [result.value for result in results] == [1_000_000.0, 300_000.0, 4.0]


def test_pool_replaces_processes_that_retire_or_end(open_pool: Callable[..., VerifierPool]) -> None:
    with open_pool("good", "raises", "leaves_a_thread") as pool:
        (first,) = pool.pids
        assert pool.score_all([call(0), call(1)])[0].value == 4.0
        assert pool.pids == [first]
        assert pool.score_all([call(2)])[0].value == 5.0
        assert wait_until(lambda: pool.pids not in ([], [first]))
        (second,) = pool.pids
        assert pool.score_all([call(0)])[0].value == 4.0
        assert pool.pids == [second]
        os.kill(second, signal.SIGKILL)  # while idle, so no call fails
        assert wait_until(lambda: not running(second))
        assert pool.score_all([call(0)])[0].value == 4.0


def test_verifier_environment_is_clean(open_pool: Callable[..., VerifierPool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "secret")
    with open_pool("sees_a_secret") as pool:
        assert [result.value for result in pool.score_all([call(0, "A_TOKEN"), call(0, "PATH")])] == [0.0, 1.0]


def test_pool_outlives_the_thread_that_opened_it(open_pool: Callable[..., VerifierPool]) -> None:
    pools: list[VerifierPool] = []
    thread = threading.Thread(target=lambda: pools.append(open_pool("good")))
    thread.start()
    thread.join()
    (pid,) = pools[0].pids
    with pools[0] as pool:
        assert not wait_until(lambda: not running(pid), seconds=0.3)
        assert pool.score_all([call(0)])[0].value == 4.0
        assert pool.pids == [pid]


def test_closing_a_pool_leaves_no_process_or_descriptor(open_pool: Callable[..., VerifierPool]) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    before = descriptors()
    pool = open_pool("good", "vanishes", workers=2)
    pool.score_all([call(1), call(0)])
    pids = pool.pids
    assert descriptors() > before
    pool.close()
    pool.close()
    assert descriptors() <= before, "fewer if those of earlier tests were collected meanwhile"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(VerifierUnavailable, match="closed"):
        pool.score_all([call(0)])


def test_verifiers_end_with_their_parent(tmp_path: Path) -> None:
    (tmp_path / "verifiers.py").write_text(BAD_VERIFIERS)
    parent = f"""
import sys, threading
from operators.score.pool import VerifierCall, VerifierPool
setup = {{"rewards": [{{"name": {str(tmp_path / "verifiers.py:sleeps")!r}, "options": {{}},
                       "extraction": ["whole", ""]}}],
          "memory_limit_mb": 512, "allow_processes": False}}
pool = VerifierPool(setup, 2, 60.0)
print(*pool.pids, flush=True)
pool.score_all([VerifierCall(0, {{"text": "", "tokens": 0, "prompt": "", "task": "", "reference": "{{}}"}})])
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        assert all(running(pid) for pid in pids)
        process.kill()
    assert wait_until(lambda: not any(running(pid) for pid in pids))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise RuntimeError('not today')", "RuntimeError: not today"),
        ("import nowhere_to_be_found", "nowhere_to_be_found"),
        ("def other(text): return 1.0", "has no function 'reward'"),
        ("def reward(text, colour): return 1.0", "needs 'colour'"),
        ("def reward(text, /): return 1.0", "must be callable by name"),
        ("import os; os._exit(4)", "end before they are ready: exit status 4"),
    ],
)
def test_pool_raises_for_a_reward_that_cannot_be_loaded(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    rewards = [{"name": f"{tmp_path / 'mine.py'}:reward", "options": {}, "extraction": ("whole", "")}]
    limits = {"memory_limit_mb": 512, "allow_processes": False}
    with pytest.raises(VerifierUnavailable, match=message):
        VerifierPool({"rewards": rewards, **limits}, 1, 1.0)


def test_process_that_cannot_be_started_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised in a thread of the pool, for whose result the caller waits."""

    def no_process(*arguments: object) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr("operators.score.pool.WorkerProcess", no_process)
    with pytest.raises(WorkersUnavailable, match="too many open files"):
        VerifierPool({"rewards": []}, 2, 1.0)
