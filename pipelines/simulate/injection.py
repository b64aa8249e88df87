"""Injects the faults of a history into its world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from infra.kafka.simulated_producer import SimulatedRecord, as_it_is
from infra.simulation.brokers import BROKERS, Led, Reach
from infra.simulation.cluster import Place
from infra.simulation.data_network import LINK_FAULTS, LinkFault
from infra.simulation.network import OF_COORDINATORS, ONLY, REQUEST_FAULTS, RequestFaults
from infra.simulation.process import SimulatedProcess
from pipelines.simulate.configurations import has_goal, resharded_role, resumed_roles
from pipelines.simulate.faults import Fault
from pipelines.simulate.hosts import SimulatedHosts
from pipelines.simulate.simulated_role import SimulatedRole, start_resharding, start_trim
from schemas.codec import encode
from schemas.records import Drain, Pause
from schemas.topics import CONTROL, INBOX, PAUSE

if TYPE_CHECKING:
    from pipelines.simulate.world import World

REACHED: Sequence[Reach] = ("all", "all", "isolated")
"""What the process of such a fault reaches of an isolated broker and the others; every other process reaches these."""
ONLY_SHARE = 1 / 3
"""Share of the faults of requests that only some kinds of requests have."""


class FaultInjector:
    """Injects faults into `world`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pauses = 0
        self._changing = False
        self._delay_markers(0.0, Random())

    def inject(self, fault: Fault) -> None:
        """Begin a fault."""
        world = self._world
        world.event(fault.role, f"fault {fault.kind} for {fault.seconds:.1f} s")
        role, now = world.roles.get(fault.role), world.scheduler.now
        if role is None:  # a shard of an earlier layout
            return
        draws = world.streams.of("fault", str(fault.number))
        disturb = partial(RequestFaults, fault.role, now, now + fault.seconds, draws=draws)
        match fault.kind:
            case "kill":
                role.kill(min(fault.seconds, 3.0))
            case "pause":
                role.pause(fault.seconds)
            case "replace":
                role.replace(fault.seconds)
            case "requests":
                kinds = tuple(draws.sample(REQUEST_FAULTS, draws.randint(1, 3)))
                share, only = draws.choice((0.05, 0.2, 0.6)), world.streams.of("fault", str(fault.number), "only")
                by_request = only.choice(ONLY) if only.random() < ONLY_SHARE else {}
                share = 0.5 if by_request else share
                world.network.faults.append(disturb(kinds=kinds, share=share, by_request=by_request))
            case "late_reads":
                world.network.faults.append(disturb(kinds=(), share=0.5, by_request={"Fetch": "slow"}))
            case "cut":
                world.network.faults.append(disturb(kinds=("lost",), share=1.0))
            case "stop":
                role.stop()
            case "notice":
                role.give_notice(fault.seconds)
            case "move_coordinator":
                of_coordinators = disturb(kinds=(), share=1.0, by_request=dict.fromkeys(OF_COORDINATORS, "moved"))
                world.network.faults.append(of_coordinators)
            case "isolate_broker":
                world.brokers.isolate(draws.randrange(BROKERS), fault.seconds, {fault.role: draws.choice(REACHED)})
            case "markers":
                self._delay_markers(now + fault.seconds, draws)
            case "expire_offsets":
                world.cluster.forget_offsets()
            case "reshard_run":
                self._reshard(fault.seconds, draws)
            case "change_ranks":
                self._change_ranks(fault.seconds, draws)
            case "drain":
                self._drain(role)
            case "pause_run":
                self._pause_run(True)
                world.scheduler.after(fault.seconds, lambda: self._pause_run(False))
            case "slow":
                role.slow_until = now + fault.seconds
            case "links" | "restart_host" if world.hosts and (host := world.hosts.host_of(role.name)) is not None:
                if fault.kind == "links":
                    for kind in draws.sample(LINK_FAULTS, draws.randint(1, 2)):
                        world.event(role.name, f"the link of {host} is {kind}")
                        world.hosts.network.faults.append(LinkFault(host, now, now + fault.seconds, kind))
                else:
                    self._restart_host(world.hosts, host, fault.seconds)
            case "trim":
                process = SimulatedProcess(world.scheduler, "trim", self._trim_ended)
                start_trim(process, world.cluster, world.config.run.name, partial(world.event, "trim"))
                world.scheduler.after(fault.seconds, process.kill)
            case "upgrade_run" | "restart_run" | "extend_run":
                if fault.kind == "upgrade_run":
                    world.release = as_it_is
                if fault.kind == "extend_run" and not self._extend():
                    return
                for name, each in world.roles.items():
                    each.end()
                    share = 1.0 if each is role else world.streams.of(name, fault.kind.removesuffix("_run")).random()
                    each.start_in(fault.seconds * share)

    def _delay_markers(self, end: float, draws: Random) -> None:
        """Delay the markers of transactions until `end`; those to an isolated broker are delayed at any time."""
        world = self._world
        most = draws.choice((0.05, 0.5, 4.0))

        def later(led: Led, write: Callable[[], None]) -> None:
            delay_s = world.brokers.marked_in(led)
            if world.scheduler.now < end:
                delay_s += most * draws.random() ** 2
            if delay_s:
                world.scheduler.after(delay_s, write)
            else:
                write()

        world.cluster.later = later

    def _extend(self) -> bool:
        """Give the run a later goal; False if it has none."""
        world = self._world
        if not has_goal(world.history.shape) or self._changing:
            return False
        trainer = world.config.trainer
        later = replace(trainer, optimizer_steps=trainer.optimizer_steps + 1)
        world.config = replace(world.config, trainer=later)
        world.invariants.extend(world.config)
        for each in resumed_roles(world.history.shape, world.config):
            world.roles[each.role.name].wiring = each
        return True

    def _reshard(self, seconds: float, draws: Random) -> None:
        """End the run and resume it with other shards of a role that has some: by a command that is killed once."""
        world = self._world
        role = resharded_role(world.config)
        if role is None or self._changing:
            return
        before = getattr(world.config, role)
        most = world.config.kafka.partitions if role == "score" else before.max_shards
        shards = draws.choice([n for n in range(1, most + 1) if n != before.shards])
        self._changing = True
        for each in world.roles.values():
            each.retire()
        config = replace(world.config, **{role: replace(before, shards=shards)})
        roles = resumed_roles(world.history.shape, config)

        def ended(error: Exception | None) -> None:
            if error is not None:
                world.fail(f"resharding ended with {type(error).__name__}: {error}")
                return
            self._changing = False
            world.event(role, f"has {shards} shards from here on")
            world.change_roles(config, roles)

        first = SimulatedProcess(world.scheduler, "reshard", ended)
        second = SimulatedProcess(world.scheduler, "reshard again", ended)
        start_resharding(first, config, role, world.connect(first))

        def again() -> None:
            if first.alive:
                first.kill()
                start_resharding(second, config, role, world.connect(second))

        world.scheduler.after(seconds * draws.random(), again)

    def _change_ranks(self, seconds: float, draws: Random) -> None:
        """End the run and resume it with another number of ranks, if batches have several shares."""
        world, trainer = self._world, self._world.config.trainer
        counts = [count for count in range(1, trainer.shares + 1) if count != trainer.ranks]
        if not counts or self._changing:
            return
        self._changing = True
        for each in world.roles.values():
            each.retire()
        later = replace(trainer, ranks=draws.choice(counts))
        config = replace(world.config, trainer=later)
        roles = resumed_roles(world.history.shape, config)

        def resume() -> None:
            self._changing = False
            world.event("trainer", f"has {config.trainer.ranks} ranks from here on")
            world.change_roles(config, roles)

        world.scheduler.after(seconds, resume)

    def _restart_host(self, hosts: SimulatedHosts, host: str, seconds: float) -> None:
        on_it = [each for name, each in self._world.roles.items() if hosts.host_of(name) == host]
        for each in on_it:
            each.end()
        hosts.lose_store(host)
        for each in on_it:
            each.start_in(min(seconds, 5.0))

    def _trim_ended(self, error: Exception | None) -> None:
        if error is not None:
            self._world.fail(f"the trim ended with {type(error).__name__}: {error}")

    def _pause_run(self, paused: bool) -> None:
        """As `laminar runs pause` and `unpause`. Of pauses that overlap, the first end counts."""
        world = self._world
        self._pauses += 1
        value, headers = encode(Pause(self._pauses, paused, "a person", "", 0))
        world.cluster.send(
            Place(CONTROL.name(world.config.run.name), 0), [SimulatedRecord(PAUSE.encode(), value, tuple(headers), 0)]
        )

    def _drain(self, role: SimulatedRole) -> None:
        """Drain the first replica of a rollout process, which is restarted after a while: else none would be left."""
        world, start = self._world, role.start_number
        if not start or not world.invariants.placement_started:  # as `laminar replicas drain`, which then refuses
            return
        replica = world.config.rollout.hosted(role.wiring.role.index)[0]
        value, headers = encode(Drain(replica, start))
        message = SimulatedRecord(b"", value, tuple(headers), 0)
        world.cluster.send(Place(INBOX.name(world.config.run.name), replica), [message])
        world.scheduler.after(20.0, lambda: role.kill(1.0))
