"""Ranks find each other through a file, and those that are left notice that one is gone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
import torch.distributed as dist

from infra.listening import listening_sockets
from infra.runners.stopping import STOPPING
from operators.trainer.ranks import Ranks
from operators.trainer.rendezvous import RankLost, Rendezvous, _bind_collectives, wait_for_ranks

TWO = [Ranks(rank, 2) for rank in range(2)]


class Hall:
    """Where ranks, each a thread here, look for each other."""

    def __init__(self, file: Path, threads: ThreadPoolExecutor) -> None:
        self.file, self._threads = file, threads

    def come(self, rank: int) -> Future[Rendezvous]:
        return self._threads.submit(wait_for_ranks, self.file, TWO[rank])

    def told(self) -> str:
        return self.file.read_text() if self.file.exists() else ""


@pytest.fixture
def hall(tmp_path: Path) -> Iterator[Hall]:
    with ThreadPoolExecutor() as threads:
        yield Hall(tmp_path / "of a run" / "ranks.json", threads)
        STOPPING.set()
    STOPPING.clear()


def test_ranks_meet_whoever_comes_first(hall: Hall) -> None:
    second, first = hall.come(1), hall.come(0)
    for rendezvous in (first.result(20), second.result(20)):
        rendezvous.check()


def test_who_comes_in_the_place_of_another_ends_the_meeting_and_begins_the_next(hall: Hall) -> None:
    before = [hall.come(0), hall.come(1)]
    zero, one = (each.result(20) for each in before)
    told = hall.told()
    late = hall.come(1)
    for rendezvous in (zero, one):
        with pytest.raises(RankLost, match="in the place of a rank"):
            check_for_ever(rendezvous)
    assert not late.done()
    again = hall.come(0).result(20)
    late.result(20).check()
    again.check()
    assert hall.told() != told


def test_rank_0_is_missed(hall: Hall) -> None:
    before = [hall.come(0), hall.come(1)]
    one = before[1].result(20)
    before[0].result(20)
    del before
    with pytest.raises(RankLost, match="rank 0 is gone"):
        check_for_ever(one)


def test_the_store_of_somebody_else_at_the_port_is_none(hall: Hall) -> None:
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    hall.file.parent.mkdir()
    hall.file.write_text(json.dumps({"host": "127.0.0.1", "port": other.port, "token": "of one that is gone"}))
    second = hall.come(1)
    first = hall.come(0)
    first.result(20).check()
    second.result(20).check()
    assert other.num_keys() <= 1  # torch's own; nothing of the meeting


def test_a_wish_to_stop_ends_the_waiting(hall: Hall) -> None:
    waiting = [hall.come(0)]
    while not hall.told():
        assert not waiting[0].done()
    STOPPING.set()
    with pytest.raises(RankLost, match="asked to stop"):
        waiting[0].result(20)


def check_for_ever(rendezvous: Rendezvous) -> NoReturn:
    while True:
        rendezvous.check()


def test_one_rank_alone_waits_for_nobody(tmp_path: Path) -> None:
    Rendezvous().check()


def test_rank_0_listens_at_its_host_alone(hall: Hall) -> None:
    before = listening_sockets([psutil.Process()])
    ranks = [hall.come(0), hall.come(1)]
    rendezvous_of_ranks = [each.result(20) for each in ranks]
    opened = listening_sockets([psutil.Process()]) - before
    assert [host for host, _ in opened] == ["127.0.0.1"], rendezvous_of_ranks


def test_collectives_listen_on_the_interface_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    own = {name: [each.address for each in held] for name, held in psutil.net_if_addrs().items()}
    _bind_collectives("127.0.0.1")
    assert "127.0.0.1" in own[os.environ["GLOO_SOCKET_IFNAME"]]
    assert os.environ["NCCL_SOCKET_IFNAME"] == os.environ["GLOO_SOCKET_IFNAME"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    _bind_collectives("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
