"""Restores the real steps in a simulated process: with its clocks, its clients and emulated engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from infra.kafka.producer import DeliveryFailed
from infra.kafka.role_notes import ReadNotes, notes_reader
from infra.kafka.simulated_clients import SimulatedClients
from infra.simulation.process import SimulatedProcess
from infra.simulation.scheduler import Signal
from operators.evaluation.evaluate_versions import EvaluateVersions
from operators.experience.make_batches import MakeBatches
from operators.io.elements import Restored, ShardFold
from operators.io.fold_records import FoldStep
from operators.placement.place_trajectories import PlaceTrajectories
from operators.prompts.draw_prompts import DrawPrompts
from operators.relay.relay import RelayStep
from operators.rollout.backend import EmulatedSpec
from operators.rollout.emulated_backend import EmulatedBackend
from operators.rollout.engine import Engine
from operators.rollout.episodes import EpisodeEngine
from operators.rollout.generate_trajectories import GenerateTrajectories, RolloutFold
from operators.rollout.heartbeats import NO_LOAD, replica_status
from operators.rollout.replica import Replica
from operators.rollout.two_versions import TwoVersionEngine
from operators.score.score_trajectories import ScoreTrajectories
from operators.trainer.emulate_training import EmulateTraining
from pipelines.simulate.transfers import Transfers
from schemas.codec import encode
from schemas.records import ReplicaStatus
from schemas.topics import PROMPTS, REPLICAS, group_name


class SimulatedNotice:
    """The notice that a process will end, as `infra.runners.stopping.TerminationNotice`."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process
        self.given_at: float | None = None

    def give(self) -> None:
        self.given_at = self._process.monotonic()

    def end(self) -> None:
        self._process.stopping = True


class SimulatedStep:
    """`step` as a process of a simulation runs it. With `transfers` weights and KV have bytes."""

    def __init__(
        self,
        step: FoldStep,
        process: SimulatedProcess,
        clients: SimulatedClients,
        transfers: Transfers | None,
        notice: SimulatedNotice,
    ) -> None:
        self._step, self._process, self._clients, self._transfers = step, process, clients, transfers
        self._notice = notice

    def restore(self, restored: Restored) -> ShardFold:
        """The fold of a start. Raises TypeError for a step that cannot be simulated."""
        process, clients, step, transfers = self._process, self._clients, self._step, self._transfers
        clock, now = process.monotonic, process.unix_ms
        match step:
            case DrawPrompts():
                backlog: Any = _Backlog(clients, group_name(step.shard.run, "placement"), PROMPTS.name(step.shard.run))
                return step.restore(restored, backlog, clock, now, self._undecided_notes(step.shard.run))
            case PlaceTrajectories():
                return step.restore(restored, clients, clock, now)
            case GenerateTrajectories():
                return self._generate(step, restored)
            case ScoreTrajectories():
                return step.restore(restored, now)
            case MakeBatches():
                notes = None if step.shard is None else self._undecided_notes(step.shard.run)
                return step.restore(restored, now, clock, notes)
            case EmulateTraining() if transfers is not None:
                return transfers.training(step, restored, process, clients)
            case RelayStep() if transfers is not None:
                return transfers.relay(step, restored, process, clients)
            case EmulateTraining():
                producer: Any = clients.plain_producer()
                notes = notes_reader(step.shard.run, clients.observer)
                return step.restore(restored, producer, clock, now, notes=notes)
            case EvaluateVersions():
                return step.restore(restored, clock, now)
            case _ if transfers is not None:
                return transfers.rank(step, restored, process, clients)
        raise TypeError(f"{type(step).__name__} cannot be simulated")

    def _undecided_notes(self, run: str) -> ReadNotes:
        return notes_reader(run, self._clients.observer, undecided=True)

    def _generate(self, step: GenerateTrajectories, restored: Restored) -> RolloutFold:
        process, spec = self._process, step.backend
        assert isinstance(spec, EmulatedSpec)
        hosted = step.config.hosted(step.process)
        heartbeats: Any = SimulatedHeartbeats(process, self._clients.plain_producer(), step, restored)
        backend = EmulatedBackend(spec.config, spec.time_scale, spec.keep_versions, process.monotonic)
        transfers = self._transfers
        kv = None if transfers is None else transfers.kv(process)
        replica = partial(
            Replica,
            weights=backend.weights if transfers is None else transfers.weights(process),
            decode=backend.decode,
            now=process.unix_ms,
            config=step.config,
            interrupts=step.interrupts,
            check=backend.check,
            clock=process.monotonic,
            kv_transfers=kv,
        )

        def with_episodes(engine: Engine, index: int) -> EpisodeEngine:
            checked = engine if transfers is None else transfers.engine(engine, index)
            return EpisodeEngine(checked, {}, backend.encode, backend.decode, {})

        replicas = []
        for index in hosted:
            if step.two_versions:
                both = TwoVersionEngine(*(with_episodes(each, index) for each in backend.engine_pair()))
                replicas.append(replica(index, restored.start, both, may_load=both.may_load))
            else:
                replicas.append(replica(index, restored.start, with_episodes(backend.engine(), index)))
        heartbeats.set_replicas(replicas)
        return RolloutFold(
            *(step.config, replicas, heartbeats, backend, process.monotonic),
            state=restored.state,
            kv_transfers=kv,
            notice=self._notice,
        )


class _Backlog:
    """Placement's lag, with the methods of `infra.kafka.lag.Backlog`."""

    def __init__(self, clients: SimulatedClients, group: str, topic: str) -> None:
        self._clients, self._group, self._topic = clients, group, topic

    def records(self) -> int | None:
        return self._clients.backlog(self._group, self._topic)

    def close(self) -> None:
        """Nothing to do."""


class SimulatedHeartbeats:
    """Publishes the status of the replicas of `rollout` every `heartbeat_s` seconds, and at once after `send_now`."""

    def __init__(
        self, host: SimulatedProcess, producer: Any, rollout: GenerateTrajectories, restored: Restored
    ) -> None:
        self._host, self._producer, self._rollout = host, producer, rollout
        self._incarnation, self._first_incarnation = restored.start, restored.first_start
        self._replicas: Sequence[Replica] = ()
        self._closed, self._wake = False, Signal()
        host.start(f"heartbeats {restored.start}", self._beat, vital=False)

    def set_replicas(self, replicas: Sequence[Replica]) -> None:
        """Report the status of `replicas` from now on."""
        self._replicas = replicas
        self.send_now()

    def send_now(self) -> None:
        """Publish now."""
        self._host.scheduler.notify(self._wake)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of the replicas, which takes no time here."""
        yield

    def close(self) -> None:
        """End after the present heartbeat. Placement learns of the end from the next start, or from a time-out."""
        self._closed = True
        self.send_now()

    def _beat(self) -> None:
        topic = REPLICAS.name(self._rollout.shard.run)
        while not self._closed:
            for status in self._statuses():
                value, headers = encode(status)
                try:
                    self._producer.send(topic, value, key=f"rollout-{status.replica}".encode(), headers=headers)
                except DeliveryFailed:
                    break  # the next one has newer data
            self._host.scheduler.wait([self._wake], self._rollout.config.heartbeat_s)

    def _statuses(self) -> list[ReplicaStatus]:
        process, run = self._rollout.process, self._rollout.shard.run
        found = [
            replica_status(
                *(each.index, process, each.incarnation, each.state, each.engine.version),
                *(each.engine.status(), 0.0, run, each.reserved),
                kv=each.kv_transfers,
            )
            for each in self._replicas
        ] or [
            replica_status(index, process, self._incarnation, "starting", None, NO_LOAD, 0.0, run)
            for index in self._rollout.config.hosted(process)
        ]
        host, now, first = self._host.name, self._host.unix_ms(), self._first_incarnation
        return [replace(each, host=host, pid=1, sent_at=now, first_incarnation=first) for each in found]
