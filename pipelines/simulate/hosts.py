"""The hosts of a simulated run with relays: which process runs where, the stores of weights, and the network."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from safetensors.numpy import load_file

from infra.simulation.data_network import DataNetwork
from infra.simulation.process import SimulatedProcess
from infra.simulation.rank_group import RankStores
from infra.simulation.scheduler import EventScheduler
from infra.simulation.streams import Streams
from infra.simulation.system import SimulatedSystem
from infra.store.names import SHARED_MEMORY, WEIGHTS, version_of, weight_file
from infra.store.weight_store import WeightStore
from pipelines.simulate.transferred_bytes import file_of
from pipelines.simulate.wiring import Wiring
from schemas.records import PolicyVersion, WeightVersion

TOKEN = "a token of simulated relays"


class SimulatedHosts:
    """As many hosts as there are `relays`, at least 2. The trainer is on the first, or on
    another one without a relay; the rollouts are on the others.

    The stores are real ones, in a folder that `close` removes.
    """

    def __init__(
        self,
        relays: int,
        scheduler: EventScheduler,
        streams: Streams,
        content_of: Callable[[PolicyVersion], str] = str,
        trainer_host: str = "host-0",
    ) -> None:
        """`content_of` is the content of each version: see `transferred_bytes.file_of`."""
        self._trainer_host = trainer_host
        self.relays, self._streams, self.content_of = relays, streams, content_of
        self.network = DataNetwork(scheduler, streams)
        self.published: Mapping[PolicyVersion, WeightVersion] = {}
        """The manifests of all versions so far."""
        self.loaded: dict[int, PolicyVersion | None] = {}
        """The version that each replica generates under."""
        base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        self.folder = Path(tempfile.mkdtemp(prefix="laminar-simulated-", dir=base))
        self.checkpoints = self.folder / "checkpoints"
        self._checked: dict[str, set[str]] = {}
        self._checked_checkpoints: set[str] = set()
        self._stores: dict[SimulatedProcess, list[WeightStore]] = {}
        self.rank_stores = RankStores()
        self.joined: set[SimulatedProcess] = set()
        """The processes that have joined a process group: each can once."""

    def host_of(self, name: str) -> str | None:
        """The host of role `name`; None if it uses neither weights nor KV."""
        pipeline, _, index = name.partition("-")
        if pipeline == "relay":
            return f"host-{index}"
        if pipeline == "rollout":
            return f"host-{1 + int(index) % (self.relays - 1)}"
        return self._trainer_host if pipeline == "trainer" else None

    def system(self, process: SimulatedProcess) -> SimulatedSystem:
        """The services of a process."""
        host = self.host_of(process.name)
        assert host is not None
        return SimulatedSystem(process, self.network, host, self._streams.of(process.name, "secret names"))

    def root(self, host: str) -> Path:
        """The folder of the store of a host."""
        return self.folder / host

    def place(self, wiring: Wiring) -> Wiring:
        """`wiring` with the folders of these hosts, if it is of a rank of the real trainer."""
        if not hasattr(wiring.step, "checkpoints"):
            return wiring
        model = self.folder / "model"
        if not model.exists():
            model.mkdir()
            (model / "config.json").write_text("{}")
            (model / "model.safetensors").write_bytes(file_of(""))
        step = replace(wiring.step, checkpoints=self.checkpoints, model=model)
        if hasattr(step, "publish"):
            step = replace(step, result=self.folder / "result", publish=replace(step.publish, token=TOKEN))
        shard = replace(wiring.shard, start_positions=step.resumed().start_positions)
        return replace(wiring, step=step, shard=shard)

    def open_store(self, process: SimulatedProcess, keep: int) -> WeightStore:
        """Open the store of the host of a process, until the process ends."""
        host = self.host_of(process.name)
        assert host is not None
        store = WeightStore(self.root(host), keep)
        self._stores.setdefault(process, []).append(store)
        return store

    def end_process(self, process: SimulatedProcess, end_fibers: Callable[[], None]) -> None:
        """End the fibers of a process, and free what its kernel frees: locks, memory and connections.

        The fibers end with their `finally` blocks, which a killed process does not run: meanwhile the store's folder
        is elsewhere, so they change no file.
        """
        stores, host = self._stores.pop(process, []), self.host_of(process.name)
        if not stores or host is None:
            end_fibers()
        else:
            root, away = self.root(host), self.folder / f"{host}.away"
            root.rename(away)
            try:
                end_fibers()
                for store in stores:
                    store.close()
            finally:
                away.rename(root)
        self.network.end_process(process)

    def missing(self, newest: PolicyVersion | None) -> list[str]:
        """The hosts whose store lacks version `newest`, and the replicas that have not loaded it."""
        if newest is None:
            return []
        file = weight_file(newest)
        return [
            *(host for host in map("host-{}".format, range(self.relays)) if not (self.root(host) / file).exists()),
            *(f"replica {replica}" for replica, version in self.loaded.items() if version != newest),
        ]

    def invalid_versions(self) -> list[str]:
        """The versions that became visible since the last call with other bytes than their trainer's, with hosts."""
        found = []
        for host in map("host-{}".format, range(self.relays)):
            root, checked = self.root(host), self._checked.setdefault(host, set())
            visible = {each.name: each for each in root.glob(f"*{WEIGHTS}")}
            checked &= visible.keys()
            for name in sorted(visible.keys() - checked):
                version = version_of(name)
                if version is not None and visible[name].read_bytes() != file_of(self.content_of(version)):
                    found.append(f"version {version} of {host}")
                checked.add(name)
        return found

    def invalid_checkpoints(self) -> list[str]:
        """The checkpoints completed since the last call that do not hold the weights of their version."""
        found = []
        for folder in self.checkpoints.glob("[0-9]*"):
            if folder.name not in self._checked_checkpoints:
                self._checked_checkpoints.add(folder.name)
                held = load_file(min(folder.glob("rank-0-of-*")))["weights.content"].tobytes().hex()
                if held != self.content_of(PolicyVersion.parse(folder.name)):
                    found.append(folder.name)
        return found

    def lose_store(self, host: str) -> None:
        """Remove the store of a host, whose processes have ended: its memory is gone after a restart."""
        shutil.rmtree(self.root(host), ignore_errors=True)

    def close(self) -> None:
        """Remove all stores."""
        shutil.rmtree(self.folder, ignore_errors=True)
