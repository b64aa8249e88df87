"""A whole run in virtual time: real placement, real replicas, emulated engines, trainer and buffer as counts.

Records pass between the roles in memory, without Kafka: an encoded record costs more than all the decisions about it.
Placement is the product's fold, with its tracking, dispatch, moves and leases; a replica is the product's `Replica`.
The next event decides how far time leaps, so the cost of a run depends on its trajectories and not on their tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from infra.kafka.properties import ClientProperties
from infra.runners.garbage_collection import without_collections
from infra.simulation.scheduler import EventScheduler
from operators.io.config import ShardConfig
from operators.io.elements import PartitionKey, Polled, ReceivedRecord, Restored
from operators.io.repartition import Placed, repartition
from operators.placement.place_trajectories import PlacementFold, PlaceTrajectories
from operators.placement.tracking import FinishedTrajectory
from operators.rollout.emulated_backend import AnnouncedWeights
from operators.rollout.emulated_engine import emulated_scheduling, share_device
from operators.rollout.engine import Engine
from operators.rollout.replica import Replica, ReplicaEvent, ReplicaOrder
from operators.rollout.response_lengths import Lengths, open_lengths
from operators.rollout.roofline import Roofline
from operators.rollout.tool_calls import open_tools
from operators.rollout.two_versions import TwoVersionEngine
from pipelines.simulate.prediction.cluster import Cluster
from pipelines.simulate.prediction.counted_engine import CountedEngine, CountedKVTransfers
from pipelines.simulate.prediction.measurement import Measurement
from pipelines.simulate.prediction.replicas import PredictedReplica
from pipelines.simulate.prediction.training import PredictedTraining, version_of
from schemas.columns import token_ids
from schemas.records import (
    AssignmentRejected,
    Prompt,
    RepackPlan,
    ReplicaStatus,
    Sampling,
    Settled,
    Trajectory,
    WeightVersion,
)
from schemas.topics import INBOX, PLANS, PROGRESS, PROMPTS, RELAY, REPLICAS, SETTLED, TRAJECTORIES, Topic

STOP = 1
RUN = "prediction"


class PredictedWorld:
    """One run of `cluster`, without faults but those that `kill` injects.

    `lengths` replace those of the configuration. `at_version` is called with the number of each version that arrives.
    """

    def __init__(
        self, cluster: Cluster, lengths: Lengths | None = None, at_version: Callable[[int], None] = lambda number: None
    ) -> None:
        config, self._cluster = cluster.config, cluster
        self._at_version = at_version
        self.scheduler = EventScheduler()
        self._scale = config.run.time_scale
        self._hop_s = cluster.overheads.hop_s
        (self._task,) = config.prompts.mixture
        self.measurement = Measurement(cluster)
        emulation = config.rollout.emulation
        self._lengths = lengths or open_lengths(emulation.lengths)
        self._tools = open_tools(emulation.tools)
        speculation = emulation.speculation if config.rollout.speculation else None
        self._roofline = Roofline(emulation.roofline, emulation.stride, speculation)
        self._scheduling = emulated_scheduling(
            config.rollout.most_slots, config.context, config.rollout.kv_capacity, emulation
        )
        self._placement = self._placement_fold()
        self._inbox: list[ReceivedRecord] = []
        self._offsets: Counter[str] = Counter()
        self._folds = False
        self._prompts = self._begun = 0
        self.training = PredictedTraining(self.scheduler, cluster, self._settle, self._publish_version)
        self.replicas: dict[int, PredictedReplica] = {}
        self._incarnations = Counter[int]()
        self._published = False

    def run(self) -> Measurement:
        """Run to the goal of `trainer.optimizer_steps`. Raises ValueError if the run stops before it."""
        goal = self._cluster.config.trainer.optimizer_steps
        for index in range(self._cluster.replicas):
            self.start(index)
        self._publish_version(0)
        while not self.scheduler.stopped:
            steps, until = len(self.training.steps), self.scheduler.now + self._limit_s()
            with without_collections():  # a sixth of the CPU time
                self.scheduler.run(until)
            if not self.scheduler.stopped and len(self.training.steps) == steps:
                raise ValueError(
                    f"no batch was trained for {self._limit_s():,.0f} s after step {steps} of {goal}: "
                    "experience.global_batch may exceed what placement admits"
                )
        self.measurement.finish(self.scheduler.now, self.training.steps)
        self.scheduler.close()
        return self.measurement

    def start(self, index: int) -> None:
        """Start an incarnation of replica `index`."""
        config, scheduler = self._cluster.config, self.scheduler
        self._incarnations[index] += 1
        weights, engines, may_load = AnnouncedWeights(keep=64), [self._engine()], None
        engine: Engine = engines[0]
        if config.placement.rules.refresh == "slot":
            engines.append(self._engine())
            share_device(*engines)
            engine = both = TwoVersionEngine(*engines)
            may_load = both.may_load
        transfers: Any = CountedKVTransfers() if config.rollout.kv_megabytes else None
        replica = Replica(
            index,
            self._incarnations[index],
            engine,
            weights,
            lambda tokens: "",
            self._now_ms,
            config.rollout,
            interrupts=config.placement.rules.refresh == "interrupt",
            kv_transfers=transfers,
            may_load=may_load,
            clock=self._clock,
        )
        predicted = PredictedReplica(
            scheduler, replica, engines, weights, self._publish_events, self._beat, config.rollout.linger_s
        )
        self.replicas[index] = predicted
        if self._published:
            predicted.announce(version_of(self.training.version))
        share = (index % 16) / 16  # heartbeats of different replicas come at different times
        scheduler.after(share * config.rollout.heartbeat_s, lambda: self._keep_beating(predicted))

    def _engine(self) -> CountedEngine:
        return CountedEngine(
            self._scheduling,
            self._roofline,
            self._lengths,
            pull_s=self._cluster.config.rollout.emulation.pull_s,
            time_scale=self._scale,
            clock=self._clock,
            status_refresh_s=self._cluster.config.rollout.heartbeat_s,
            tools=self._tools,
        )

    def kill(self, index: int, restart_s: float) -> None:
        """End replica `index` without notice; another incarnation starts `restart_s` seconds of the clock later."""
        self.replicas[index].alive = False
        self.scheduler.after(restart_s, lambda: self.start(index))

    # -- placement ----------------------------------------------------------------------------------------------------

    def _placement_fold(self) -> PlacementFold:
        config = self._cluster.config
        shard = ShardConfig(ClientProperties.at("predicted:1"), RUN, "placement")
        parts = self._cluster.training_parts
        batch = config.experience.global_batch
        step = PlaceTrajectories(
            config.placement,
            shard,
            1,
            config.admitted,
            1,
            self._cluster.replicas,
            # A round of the stream is two of its batches; here the parts of one batch stand for them.
            batch if parts == 1 else batch // config.placement.rules.round_batches,
        )
        restored = Restored("", 1, (), {}, {})
        return PlacementFold(step, restored, lambda process: None, self._clock, self._now_ms)

    def _send(self, topic: Topic, records: Iterable[Any]) -> None:
        """Send records to placement, which folds them `hop_s` later together with others of that time."""
        name = topic.short_name
        for record in records:
            self._inbox.append(ReceivedRecord(name, 0, self._offsets[name], record))
            self._offsets[name] += 1
        if self._inbox and not self._folds:
            self._folds = True
            self.scheduler.after(self._hop_s, self._fold)

    def _fold(self) -> None:
        self._folds = False
        records, self._inbox = tuple(self._inbox), []
        positions = {PartitionKey(name, 0): offset for name, offset in self._offsets.items()}
        self._route(self._placement.fold(Polled("", 1, records, (), positions, True)))
        self._draw_prompts()

    def _route(self, decisions: Sequence[Any]) -> None:
        """Write the records of `decisions`, and deliver those for inboxes."""
        for decision in decisions:
            if isinstance(decision, Placed):
                self.measurement.placed(decision, self.scheduler.now)
                self._begun += decision.reason == "dispatch" and decision.assignment.member == 0
        orders: dict[int, list[ReplicaOrder]] = {}
        for output in repartition(decisions):
            record = output.record
            if output.topic is INBOX:
                orders.setdefault(record.replica, []).append(record)
            elif output.topic is PROGRESS and isinstance(record, AssignmentRejected):
                self._send(PROGRESS, [record])
            elif output.topic is PLANS and isinstance(record, RepackPlan):
                self.measurement.planned(record)
        for index, some in orders.items():
            self.scheduler.after(self._hop_s, lambda index=index, some=some: self.replicas[index].handle(some))  # type: ignore[misc]

    def _draw_prompts(self) -> None:
        """Keep `prompt_lead` prompts ahead of dispatch, as the prompts pipeline does."""
        config = self._cluster.config
        lead = config.placement.lead(config.experience.global_batch, self._task.samples_per_prompt, levels=False)
        missing = lead - (self._prompts - self._begun)
        if missing > 0:
            self._send(PROMPTS, [self._prompt(self._prompts + n) for n in range(missing)])
            self._prompts += missing

    def _prompt(self, number: int) -> Prompt:
        task, config = self._task, self._cluster.config
        room = config.context - task.prompt_tokens
        sampling = Sampling(1.0, 1.0, 0, min(task.max_new_tokens, room), (STOP,), config.run.seed)
        tokens = np.full(task.prompt_tokens, 2, np.int32)
        tokens[0] += number % (config.rollout.emulation.vocabulary - 2)  # samples of one prompt share its prefill
        return Prompt(number, "train", "task", "", token_ids(tokens), "{}", task.samples_per_prompt, sampling)

    # -- replicas -----------------------------------------------------------------------------------------------------

    def _publish_events(self, events: Sequence[ReplicaEvent]) -> None:
        if not events:
            return
        placed: list[Placed] = []
        for event in events:
            match event:
                case Trajectory():
                    self.measurement.finished(event, self.scheduler.now, self.training.version)
                    self.scheduler.after(2 * self._hop_s, partial(self.training.add, event))  # via score
                    self._send(TRAJECTORIES, [_finished(event)])
                case Placed():
                    placed.append(event)
                case _:
                    self._send(PROGRESS, [event])
        self._route(placed)

    def _keep_beating(self, replica: PredictedReplica) -> None:
        if replica.alive:
            self._beat(replica)
            self.scheduler.after(self._cluster.config.rollout.heartbeat_s, lambda: self._keep_beating(replica))

    def _beat(self, replica: PredictedReplica) -> None:
        self.send_status(replica.status(RUN))

    def send_status(self, status: ReplicaStatus) -> None:
        """Send the heartbeat of a replica to placement."""
        busy_s = self.replicas[status.replica].replica.running.busy_seconds
        self.measurement.beat(status, busy_s, self.scheduler.now)
        self._send(REPLICAS, [status])

    # -- buffer and trainer -------------------------------------------------------------------------------------------

    def _settle(self, settled: list[Settled]) -> None:
        self._send(SETTLED, settled)

    def _publish_version(self, number: int) -> None:
        goal = self._cluster.config.trainer.optimizer_steps
        self._published, version = True, version_of(number)
        batches = () if number == 0 else (number - 1,)
        manifest = WeightVersion(version, None, number, "", 0, "", (), batches, (0,), 0, number >= goal, self._now_ms())
        self._send(RELAY, [manifest])
        for replica in self.replicas.values():
            replica.announce(version)
        if number:
            self._at_version(number)
        if number >= goal:
            self.scheduler.stop()

    def _limit_s(self) -> float:
        """The longest time without a step that is not a defect: twenty of the longest responses and of the steps."""
        task, rollout = self._task, self._cluster.config.rollout
        pace = self._roofline.pace(rollout.most_slots, self._scheduling.kv_capacity, 0)
        config = self._cluster.config
        emulation = config.rollout.emulation
        tokens = config.experience.global_batch * config.context * emulation.stride
        response_s = task.max_new_tokens * pace.first_s + emulation.tools.most_calls * emulation.tools.p99_s
        return 20 * (response_s + config.trainer.emulation.seconds(tokens)) / self._scale

    def _clock(self) -> float:
        return self.scheduler.now

    def _now_ms(self) -> int:
        return int(self.scheduler.now * 1000)


def _finished(trajectory: Trajectory) -> FinishedTrajectory:
    """What placement reads of `trajectory`: a block of columns would cost more than what is done with it."""
    prompt, tokens = trajectory.prompt, trajectory.response.token_ids
    key = prompt.purpose, prompt.number, trajectory.member, trajectory.lease
    return FinishedTrajectory(*key, trajectory.finish_reason, len(prompt.token_ids), len(tokens))
