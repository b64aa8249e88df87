"""Rendezvous of ranks through a file, and detection of a failed rank."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
import torch
import torch.distributed as dist

from infra.listening import listening_sockets
from infra.runners.stopping import STOPPING
from operators.trainer.ranks import Ranks
from operators.trainer.rendezvous import RankLost, Rendezvous, _bind_collectives, lost_ranks, wait_for_ranks

TWO = [Ranks(rank, 2) for rank in range(2)]


class RankThreads:
    """Ranks, each a thread, that rendezvous through `file`."""

    def __init__(self, file: Path, threads: ThreadPoolExecutor) -> None:
        self.file, self._threads = file, threads

    def start(self, rank: int) -> Future[Rendezvous]:
        return self._threads.submit(wait_for_ranks, self.file, TWO[rank])

    def address(self) -> str:
        return self.file.read_text() if self.file.exists() else ""


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[RankThreads]:
    with ThreadPoolExecutor() as threads:
        yield RankThreads(tmp_path / "of a run" / "ranks.json", threads)
        STOPPING.set()
    STOPPING.clear()


def test_rendezvous_completes_in_any_order(ranks: RankThreads) -> None:
    second, first = ranks.start(1), ranks.start(0)
    for rendezvous in (first.result(20), second.result(20)):
        rendezvous.check()


def test_restarted_rank_ends_the_rendezvous_for_a_new_one(ranks: RankThreads) -> None:
    before = [ranks.start(0), ranks.start(1)]
    zero, one = (each.result(20) for each in before)
    address = ranks.address()
    late = ranks.start(1)
    for rendezvous in (zero, one):
        with pytest.raises(RankLost, match="restarted and registered again"):
            check_forever(rendezvous)
    assert not late.done()
    again = ranks.start(0).result(20)
    late.result(20).check()
    again.check()
    assert ranks.address() != address


def test_check_detects_the_end_of_rank_0(ranks: RankThreads) -> None:
    before = [ranks.start(0), ranks.start(1)]
    one = before[1].result(20)
    before[0].result(20)
    del before
    with pytest.raises(RankLost, match="rank 0 has ended"):
        check_forever(one)


def test_rendezvous_ignores_an_unrelated_store(ranks: RankThreads) -> None:
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks.file.parent.mkdir()
    ranks.file.write_text(json.dumps({"host": "127.0.0.1", "port": other.port, "token": "of an ended rank"}))
    second = ranks.start(1)
    first = ranks.start(0)
    first.result(20).check()
    second.result(20).check()
    assert other.num_keys() <= 1  # torch's own key; none of the rendezvous


def test_shutdown_ends_the_wait_for_ranks(ranks: RankThreads) -> None:
    waiting = [ranks.start(0)]
    while not ranks.address():
        assert not waiting[0].done()
    STOPPING.set()
    with pytest.raises(RankLost, match="is stopping"):
        waiting[0].result(20)


@pytest.mark.parametrize("hangs", [True, False], ids=["hangs", "ends"])
def test_rank_is_lost_if_another_one_does_not_join_a_collective(hangs: bool) -> None:
    store, timeout = dist.HashStore(), timedelta(seconds=1 if hangs else 60)

    def group(rank: int) -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, 2, timeout=timeout)

    with ThreadPoolExecutor() as threads:
        groups = list(threads.map(group, range(2)))
    if not hangs:
        del groups[1]
    with pytest.raises(RankLost, match=r"trainer\.collective_timeout_s: .*gloo"), lost_ranks():
        groups[0].allreduce([torch.zeros(1)]).wait()


def test_rank_is_lost_if_nccl_fails_and_other_errors_pass() -> None:
    with pytest.raises(RankLost, match="NCCL communicator was aborted"), lost_ranks():
        raise dist.DistBackendError("NCCL communicator was aborted\nat many lines")
    with pytest.raises(RuntimeError, match=r"^ranks do not train the same batch$"), lost_ranks():
        raise RuntimeError("ranks do not train the same batch")


def check_forever(rendezvous: Rendezvous) -> NoReturn:
    while True:
        rendezvous.check()


def test_single_rank_needs_no_store(tmp_path: Path) -> None:
    Rendezvous().check()


def test_rank_0_listens_on_its_host_only(ranks: RankThreads) -> None:
    before = listening_sockets([psutil.Process()])
    started = [ranks.start(0), ranks.start(1)]
    results = [each.result(20) for each in started]
    opened = listening_sockets([psutil.Process()]) - before
    assert [host for host, _ in opened] == ["127.0.0.1"], results


def test_collectives_bind_to_the_interface_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    own = {name: [each.address for each in held] for name, held in psutil.net_if_addrs().items()}
    _bind_collectives("127.0.0.1")
    assert "127.0.0.1" in own[os.environ["GLOO_SOCKET_IFNAME"]]
    assert os.environ["NCCL_SOCKET_IFNAME"] == os.environ["GLOO_SOCKET_IFNAME"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    _bind_collectives("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
