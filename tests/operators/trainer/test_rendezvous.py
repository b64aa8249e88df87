"""Rendezvous of ranks through a file or a topic, and detection of a failed rank."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import psutil
import pytest
import torch
import torch.distributed as dist
from trainer_batches import save_tiny_model

from infra.kafka.role_notes import NO_NOTES
from infra.listening import listening_sockets
from infra.runners.stopping import STOPPING
from operators.trainer import rank_services
from operators.trainer import rendezvous as rendezvous_module
from operators.trainer.assembly import CannotTrain
from operators.trainer.config import CriticConfig, LearnerConfig
from operators.trainer.rank_addresses import AddressFile
from operators.trainer.rank_checks import common_settings
from operators.trainer.rank_lost import RankLost
from operators.trainer.rank_services import RankServices, _bind_collectives
from operators.trainer.rank_training import start_rank_training
from operators.trainer.ranks import Ranks
from operators.trainer.rendezvous import (
    Rendezvous,
    _find,
    join_process_group,
    lost_ranks,
    wait_for_ranks,
    watch_ranks,
)
from operators.trainer.training_config import TrainingConfig
from schemas.records import RankAddress

TWO = [Ranks(rank, 2) for rank in range(2)]


class RankThreads:
    """Ranks, each a thread, that rendezvous through `file`."""

    def __init__(self, file: Path, threads: ThreadPoolExecutor) -> None:
        self.file, self._threads = file, threads

    def start(self, rank: int, count: int = 2) -> Future[Rendezvous]:
        return self._threads.submit(wait_for_ranks, AddressFile(self.file), Ranks(rank, count))

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


def test_rank_that_ends_while_others_are_awaited_is_replaced(ranks: RankThreads) -> None:
    """Else the others would wait for it in a collective, up to trainer.collective_timeout_s."""
    zero, address_of_three = ranks.start(0, 3), RankAddress("", 0, "", 3, 0, "", 0)
    while isinstance(store := _find(AddressFile(ranks.file), 1, address_of_three), str):
        assert not zero.done()
    two = ranks.start(2, 3)
    while not store.check(["rank 2"]):
        assert not two.done()
    del store  # rank 1 ends
    again = ranks.start(1, 3)
    for each in (zero, two, again):
        each.result(20).check()


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
    ranks.file.write_text(json.dumps(asdict(address(other.port))))
    second = ranks.start(1)
    first = ranks.start(0)
    first.result(20).check()
    second.result(20).check()
    assert other.num_keys() <= 1  # torch's own key; none of the rendezvous


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"ranks": 4}, r"trainer\.ranks 4, rank 1 has 2"),
        ({"shard_ranks": 1}, r"trainer\.shard_ranks 1, rank 1 has 0"),
        ({"model": "of 7B"}, "a model of 7B, rank 1 has of 1B"),
        ({"settings": ["rollout.dtype=float32", "trainer.learner.epochs=2"]}, "learner.epochs 2, rank 1 has 1"),
        ({"settings": []}, r"rollout.dtype \(not set\), rank 1 has float32"),
    ],
)
def test_rank_with_other_settings_than_rank_0_does_not_register(
    tmp_path: Path, other: dict[str, Any], what: str
) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.PrefixStore("present", server)
    store.set("open", "present")
    addresses = AddressFile(tmp_path / "ranks.json")
    settings = ("rollout.dtype=float32", "trainer.learner.epochs=1")
    addresses.write(replace(address(server.port, "present"), **({"settings": settings} | other)))
    with pytest.raises(CannotTrain, match=what):
        wait_for_ranks(addresses, TWO[1], model="of 1B", settings=settings)
    assert not store.check(["rank 1"])


def test_ranks_that_wait_warn_with_ranks_address_and_reason(
    ranks: RankThreads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous_module, "FIRST_WARNING_S", 0.0)
    monkeypatch.setattr(rendezvous_module, "WARNING_S", 0.0)

    def wait_for(*texts: str) -> None:
        while not any(all(text in message for text in texts) for message in caplog.messages):
            assert not any(each.done() for each in started)
        caplog.clear()

    started = [ranks.start(2, 4)]
    wait_for("rank 2 waits for rank 0, but it has not published its address")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # so that nobody else listens there
        port = unused.getsockname()[1]
        AddressFile(ranks.file).write(address(port))
        wait_for(f"rank 0, but 127.0.0.1:{port} cannot be reached from", "Connection refused", "trainer.rank_0_host")
    started.append(ranks.start(0, 4))
    for rank in (0, 2):
        wait_for(f"rank {rank} waits for ranks 1, 3 to register with rank 0 at 127.0.0.1:", "(trainer.rank_0_host)")


def test_rank_warns_after_30_s_and_then_each_minute(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 29.0, 30.0, 31.0, 89.0, 90.0, 149.0])
    services = RankServices()
    services.system = SimpleNamespace(monotonic=lambda: next(times))  # type: ignore[assignment]
    waiting = rendezvous_module._Waiting(3, services)
    for number in range(6):
        waiting.warn_if_due(lambda number=number: f"rank 0, at {number}")
    assert caplog.messages == ["rank 3 waits for rank 0, at 1", "rank 3 waits for rank 0, at 4"]


def test_rank_0_names_the_setting_of_an_address_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"rank 0 cannot listen at 192\.0\.2\.7: .*\. Set trainer\.rank_0_host to an"):
        wait_for_ranks(AddressFile(tmp_path / "ranks.json"), TWO[0], "192.0.2.7")


@pytest.mark.parametrize(
    ("changed", "shards", "dtype", "name"),
    [
        ({"context_ranks": 2}, 1, "float32", "trainer.context_ranks=2"),
        ({"learner": LearnerConfig(betas=(0.8, 0.9))}, 1, "float32", "trainer.learner.betas=(0.8, 0.9)"),
        ({"learner": LearnerConfig(critic=CriticConfig(value_clip=1))}, 1, "float32", "learner.critic.value_clip=1"),
        ({}, 2, "float32", "experience.shards=2"),
        ({}, 1, "bfloat16", "rollout.dtype=bfloat16"),
        ({"gpus": (1, 2), "device": "cuda", "rank_0_host": "10.0.0.1"}, 1, "float32", ""),
        ({"learner": LearnerConfig(name="there/my.py:Own")}, 1, "float32", "trainer.learner.name=my.py:Own"),
    ],
)
def test_settings_that_all_ranks_need_are_part_of_the_address(
    changed: dict[str, Any], shards: int, dtype: str, name: str
) -> None:
    before = common_settings(TrainingConfig(ranks=2), 1, "float32")
    after = common_settings(TrainingConfig(ranks=2, **changed), shards, dtype)
    different = [each for each in after if each not in before]
    assert len(different) == bool(name)
    assert name in "".join(different)


def address(port: int, token: str = "of an ended rank") -> RankAddress:
    """An address on this machine."""
    return RankAddress("127.0.0.1", port, token, 2, 0, "of 1B", 0)


def test_rank_without_the_model_fails_before_the_rendezvous(tmp_path: Path) -> None:
    addresses = AddressFile(tmp_path / "ranks.json")
    with pytest.raises(CannotTrain, match=r"rank 0 has no model at .*: copy the folder of model.path"):
        start_rank_training(TrainingConfig(ranks=2), tmp_path / "model", tmp_path, 0, 1, 1, addresses, NO_NOTES)
    assert addresses.newest() is None


def test_rank_with_other_weights_than_rank_0_does_not_register(tmp_path: Path) -> None:
    """Of the same names and shapes: together they would train a mixture."""
    models = [save_tiny_model(tmp_path / name, seed=seed) for seed, name in enumerate(("first", "second"))]
    addresses = AddressFile(tmp_path / "ranks.json")
    begun = partial(start_rank_training, TrainingConfig(ranks=2), checkpoints=tmp_path, notes=NO_NOTES)
    start = partial(begun, divisions=1, epoch=1)
    with ThreadPoolExecutor() as threads:
        zero = threads.submit(start, model=models[0], rank=0, addresses=addresses)
        places = r"rank 1 has other weights in .*second on machine .* than rank 0 in .*first on machine"
        try:
            with pytest.raises(CannotTrain, match=places):
                start(model=models[1], rank=1, addresses=addresses)
        finally:
            STOPPING.set()
        with pytest.raises(RankLost, match="is stopping"):
            zero.result(20)
    STOPPING.clear()


@pytest.mark.parametrize(
    ("device", "gpus", "reason"),
    [
        ("gpu", 0, "Expected one of cpu, cuda"),
        ("cuda", 0, "torch finds 0 GPUs on"),
        ("cuda:1", 1, "torch finds 1 GPU on"),
    ],
)
def test_rank_without_its_device_fails_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(CannotTrain, match=f"the trainer cannot use the device '{device}': {reason}.*trainer.gpus"):
        start_rank_training(
            TrainingConfig(device=device), tmp_path, tmp_path, 0, 1, 1, AddressFile(tmp_path / "ranks.json"), NO_NOTES
        )


def test_shutdown_ends_the_wait_for_ranks(ranks: RankThreads) -> None:
    waiting = [ranks.start(0)]
    while not ranks.address():
        assert not waiting[0].done()
    STOPPING.set()
    with pytest.raises(RankLost, match="is stopping"):
        waiting[0].result(20)


@pytest.mark.parametrize("hangs", [True, False], ids=["hangs", "ends"])
def test_rank_is_lost_if_another_one_does_not_join_a_collective(hangs: bool) -> None:
    store, options = dist.HashStore(), dist.AllreduceOptions()
    options.timeout = timedelta(seconds=1 if hangs else 60)

    def group(rank: int) -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, 2, timeout=timedelta(seconds=60))

    with ThreadPoolExecutor() as threads:
        groups = list(threads.map(group, range(2)))
    if not hangs:
        del groups[1]
    with pytest.raises(RankLost, match=r"trainer\.collective_timeout_s: .*gloo"), lost_ranks():
        groups[0].allreduce([torch.zeros(1)], options).wait()


def test_collective_waits_for_rank_0_longer_than_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks get the id of rank 0's NCCL communicator from the store, once rank 0 is at its first collective."""
    stores: list[dist.Store] = []
    monkeypatch.setattr(rank_services, "_bind_collectives", str)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, *, store, **options: stores.append(store))
    services = RankServices(), RankServices()
    own, port = services[0].open_store("127.0.0.1", "token")
    client = services[1].connect(RankAddress("127.0.0.1", port, "token", 2, 0, "", 0, ()))
    for each, store, ranks in zip(services, (own, client), TWO, strict=True):
        each.join(store, replace(ranks, timeout_s=30), "127.0.0.1", "cpu")
    del own  # the group keeps it
    assert stores[1].timeout == timedelta(seconds=30) > client.timeout
    client.set_timeout(timedelta(seconds=1))  # once all are connected: it bounds that, too
    with ThreadPoolExecutor() as threads:
        found = threads.submit(stores[1].get, "id")
        with pytest.raises(dist.DistStoreError):
            client.get("nothing")
        stores[0].set("id", "7")
        assert found.result(20) == b"7"


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


@pytest.mark.parametrize(("device", "expected"), [("cuda", 0), ("cuda:3", 3)])
def test_rank_selects_its_gpu_also_without_a_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, expected: int
) -> None:
    selected: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", selected.append, raising=False)
    join_process_group(AddressFile(tmp_path), Ranks(), device=device)
    assert selected == [expected]


@pytest.mark.parametrize(("lost", "code"), [(True, {1}), (False, set())])
def test_rank_lost_during_work_on_a_gpu_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, lost: bool, code: set[int]
) -> None:
    """NCCL would wait for the lost rank until `collective_timeout_s`."""
    codes, checked = set[int](), threading.Event()

    class Store(dist.HashStore):
        def add(self, key: str, amount: int) -> int:
            checked.set()
            return int(lost)

    def end(code: int) -> None:
        codes.add(code)
        ended.set()

    ended = threading.Event()
    monkeypatch.setattr(rendezvous_module, "_WATCH_S", 0.001)
    monkeypatch.setattr(os, "_exit", end)
    with watch_ranks(Rendezvous(TWO[1], Store()), torch.device("cuda:1")):
        watching = [each for each in threading.enumerate() if each.name == "watch ranks"]
        assert (ended if lost else checked).wait(30)
    for each in watching:
        each.join()  # it must not end this process after the test
    assert watching
    assert codes == code


def test_gloo_ranks_and_single_ranks_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Thread", None)
    for rendezvous, device in ((Rendezvous(TWO[1], dist.HashStore()), "cpu"), (Rendezvous(), "cuda")):
        with watch_ranks(rendezvous, torch.device(device)):
            pass


def test_rank_0_listens_on_its_host_only(ranks: RankThreads) -> None:
    before = listening_sockets([psutil.Process()])
    started = [ranks.start(0), ranks.start(1)]
    results = [each.result(20) for each in started]
    opened = listening_sockets([psutil.Process()]) - before
    assert [host for host, _ in opened] == ["127.0.0.1"], results


def test_collectives_bind_to_the_interface_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "")  # so that what follows is undone
        monkeypatch.delenv(variable)
    own = {name: [each.address for each in held] for name, held in psutil.net_if_addrs().items()}
    _bind_collectives("127.0.0.1")
    assert "127.0.0.1" in own[os.environ["GLOO_SOCKET_IFNAME"]]
    assert os.environ["NCCL_SOCKET_IFNAME"] == os.environ["GLOO_SOCKET_IFNAME"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    _bind_collectives("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
