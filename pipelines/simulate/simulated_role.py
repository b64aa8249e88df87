"""One process of a simulated run and its supervisor: it starts, dies, pauses, and comes back after its successor."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from infra.kafka.session import SessionLost
from infra.simulation.process import SimulatedProcess
from pipelines.simulate.shard_process import ShardProcess
from pipelines.simulate.wiring import Wiring

if TYPE_CHECKING:
    from pipelines.simulate.world import World


class SimulatedRole:
    """One process of a run and its supervisor, which starts it again when it ends."""

    def __init__(self, world: World, wiring: Wiring) -> None:
        self._world, self.wiring = world, wiring
        self.name = wiring.role.name
        self.slow_until = 0.0
        self._process: SimulatedProcess | None = None
        self._shard: ShardProcess | None = None
        self.processes: list[SimulatedProcess] = []
        """The present process, and earlier ones that are paused."""
        self.skew_s = world.skew_s((None if world.hosts is None else world.hosts.host_of(self.name)) or self.name)
        """By how much the clock of its host is wrong."""

    @property
    def start_number(self) -> int:
        """The present start number; 0 before the first."""
        return 0 if self._shard is None else self._shard.start

    def start(self) -> None:
        """Start a process."""
        world = self._world
        world.event(self.name, "starts")
        process: SimulatedProcess

        def ended(error: Exception | None) -> None:
            self._ended(process, error)

        skew_s = self.skew_s + world.streams.of(self.name, "clock").uniform(-2, 2)
        process = SimulatedProcess(world.scheduler, self.name, ended, skew_s)
        self._process = process
        self.processes = [*(each for each in self.processes if each.alive), process]
        if world.hosts is not None:
            process.end = partial(world.hosts.end_process, process)
        self._shard = ShardProcess(self.wiring, process, world.connect(process), self._turn_s, world.transfers)

    def kill(self, seconds: float) -> None:
        """Kill the process; start another after `seconds`."""
        process = self._process
        if process is None or not process.alive:
            return
        process.kill()
        self._restart(process, seconds)

    def end(self) -> None:
        """End all its processes, paused ones too."""
        for process in self.processes:
            process.kill()

    def start_in(self, seconds: float) -> None:
        """Start a process in `seconds`, after `end`."""
        if self._process is not None:
            self._restart(self._process, seconds)

    def stop(self) -> None:
        """Ask the process to end; another starts then."""
        if self._process is not None:
            self._process.stopping = True

    def give_notice(self, seconds: float) -> None:
        """Tell the process that it will be killed in `seconds`: it hands its work over."""
        process, shard = self._process, self._shard
        if process is None or shard is None or not process.alive:
            return
        shard.notice.give()

        def kill() -> None:
            if self._process is process:
                self.kill(1.0)

        self._world.scheduler.after(seconds, kill)

    def pause(self, seconds: float) -> None:
        """Pause the process."""
        if self._process is not None:
            self._process.pause(seconds)

    def replace(self, seconds: float) -> None:
        """Pause the process, and start another at once. The first comes back as a zombie."""
        if self._process is not None and self._process.alive:
            self._process.pause(seconds)
            self.start()

    def _turn_s(self) -> float:
        return 2.0 if self._world.scheduler.now < self.slow_until else 0.4

    def _ended(self, process: SimulatedProcess, error: Exception | None) -> None:
        world = self._world
        world.event(self.name, f"ends: {error!r}")
        if error is not None and not isinstance(error, SessionLost):
            world.fail(f"{self.name} ended with {type(error).__name__}: {error}")
            return
        self._restart(process, 1.0)

    def _restart(self, process: SimulatedProcess, seconds: float) -> None:
        def start() -> None:
            if self._process is process:  # else a successor was started before
                self.start()

        self._world.scheduler.after(seconds, start)
