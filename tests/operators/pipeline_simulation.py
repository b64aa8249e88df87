"""A whole run on one in-memory log: real placement, rollouts, score, experience and evaluation, and a toy trainer.

Every role can crash at any point, before or after its commit, be paused for long, or read its topics in any order.
Invariants of every commit are asserted at the commit; those of the end, by `check`.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

from in_memory_log import Log, Shard, ShardFenced
from levels_shard import levels_shard
from record_factories import MAX_REPLICAS, PARTITIONS, prompt, shard, topic_input
from scripted_engine import ScriptedBackend, ScriptedEngine, ScriptedWeights, SilentHeartbeats
from sharded_buffer_harness import buffer_shards
from simulation_config import TIMEOUT_S, SimulationConfig
from toy_trainer import ToyTrainer

from operators.evaluation.config import EvaluationConfig
from operators.evaluation.evaluate_versions import EvaluationFold
from operators.evaluation.report_rounds import ask_questions, report_rounds
from operators.io.config import TopicInput
from operators.io.elements import Output, Restored, ShardFold
from operators.io.ledger import TrajectoryLedger
from operators.io.repartition import repartition
from operators.placement.place_trajectories import PlacementFold, PlaceTrajectories
from operators.rollout.config import RolloutConfig
from operators.rollout.generate_trajectories import RolloutFold
from operators.rollout.heartbeats import replica_status
from operators.rollout.replica import Replica
from operators.rollout.report_events import report_events
from operators.score.config import RewardSpec, ScoreConfig
from operators.score.error_counts import ScoreCounters
from operators.score.pool import VerifierResult
from operators.score.score_trajectories import _Scoring
from schemas.columns import token_ids
from schemas.identity import parse_trajectory_id
from schemas.records import (
    Assignment,
    AssignmentRejected,
    Drain,
    MicroBatch,
    Progress,
    Prompt,
    Release,
    Trajectory,
)
from schemas.topics import (
    BATCHES,
    EVAL_PROMPTS,
    EXPERIENCES,
    INBOX,
    PROGRESS,
    PROMPTS,
    RELAY,
    REPLICAS,
    SETTLED,
    TRAJECTORIES,
)

KEEP_VERSIONS = 4
report = partial(report_events, partitions=PARTITIONS)


class PipelineSimulation:
    """One run. `step` makes one random event; `calm` lets everything finish; `check` checks the log."""

    def __init__(self, seed: int, shape: SimulationConfig) -> None:
        self.rng = random.Random(seed)
        self.shape = shape
        self.log = Log()
        self.checks = True
        """Whether invariants of commits are asserted; off where a test writes foreign records."""
        self.weights = ScriptedWeights(KEEP_VERSIONS)
        self.now = 0.0
        self._fed = 0
        self._paused: dict[int, float] = {}
        self._owners: dict[str, Assignment] = {}
        self._handed: dict[str, Assignment] = {}
        self._last_lease = 0
        self._trains_at = 0.0
        self.trainer = ToyTrainer(self.log, self.weights, shape.shards)
        self.placement = Shard(self.log, _placement_shard(), self._restore_placement, repartition)
        self.rollouts = [
            Shard(self.log, self._rollout_shard(p), partial(self._restore_rollout, p), report, repartition)
            for p in range(shape.processes)
        ]
        score = shard("score", topic_input(TRAJECTORIES, blocks=True), ledger=("experiences",))
        self.score = Shard(self.log, score, _restore_score)
        self.experience = buffer_shards(self.log, shape.buffer, PARTITIONS, levels=shape.levels)
        evaluation = shard("evaluation", topic_input(EXPERIENCES, keys=("e",)), topic_input(RELAY))
        self.evaluation = Shard(self.log, evaluation, self._restore_evaluation, ask_questions, report_rounds)
        self.shards = [self.placement, *self.rollouts, self.score, *self.experience, self.evaluation]
        self.shards += [levels_shard(self.log, shape.levels, lambda: self.now)] if shape.levels else []
        for each in self.shards:
            each.start()

    # -- events ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One random event of a run."""
        rng = self.rng
        self._pass_time(rng.choice([0.01, 0.05, 0.2]))
        what = rng.random()
        if what < 0.03:
            self._restart(rng.choice(self.shards))
        elif what < 0.035:
            self.trainer.start()
        elif what < 0.045:
            self._paused[rng.randrange(self.shape.processes)] = self.now + rng.uniform(0, 3 * TIMEOUT_S)
        elif what < 0.055 and self.shape.drains:
            replica = rng.randrange(self.shape.processes * self.shape.replicas)
            incarnation = self.log.committed(self.rollouts[replica // self.shape.replicas].config.group).start
            self.log.append(INBOX, Drain(replica, incarnation), partition=replica)
        elif what < 0.06:
            self._trains_at = self.now + rng.uniform(0, 6 * TIMEOUT_S)
        elif what < 0.15:
            if self.now >= self._trains_at:
                self.trainer.train()
        else:
            each = rng.choice(self.shards)
            if self._is_paused(each):
                return
            self._turn(each, rng.choice([1, 2, 10**6]), rng.sample(each.places, rng.randint(1, len(each.places))))
            if rng.random() < 0.8:
                self._commit(each)

    def calm(self, turns: int = 2000) -> None:
        """Run without failures until all work is finished."""
        self._paused.clear()
        for each in self.rollouts if self.shape.drains else ():
            self._restart(each)  # else no replica would be left to work
        for turn in range(turns):
            if turn % 20 == 19 and not self._work_left():
                return
            self.run_undisturbed()

    def run_undisturbed(self) -> None:
        """Run for a fifth of a second without failures."""
        self._pass_time(0.2)
        self.trainer.train()
        for each in self.shards:
            self._turn(each)
            self._commit(each)

    def _pass_time(self, seconds: float) -> None:
        self.now += seconds
        while self._fed < self.shape.prompts and self._lag() < 4:
            length = 64 if self._fed % self.shape.too_long == self.shape.too_long - 1 else 3
            asked = prompt(self._fed, self.shape.samples, token_ids=token_ids([1] * length))
            self.log.append(PROMPTS, asked, asked.prompt_id)
            self._fed += 1
        for process, each in enumerate(self.rollouts):
            if each.fold is None or self._is_paused(each):
                continue
            for r in each.fold._replicas.values():  # type: ignore[attr-defined]
                load = r.engine.status()
                beat = replica_status(
                    r.index, process, r.incarnation, r.state, r.engine.version, load, 0.0, "run", r.reserved
                )
                self.log.append(REPLICAS, beat, f"rollout-{r.index}")

    def _lag(self) -> int:
        place = next(place for place in self.placement.places if place.topic == PROMPTS.short_name)
        return self.log.end(place) - self.log.committed(self.placement.config.group).offsets.get(place, 0)

    def _is_paused(self, each: Shard) -> bool:
        return each in self.rollouts and self._paused.get(self.rollouts.index(each), 0.0) > self.now

    def _turn(self, each: Shard, most: int = 10**6, only: list | None = None) -> None:
        outputs = each.turn(most, only)
        if each is self.placement and self.checks:
            self._check_dispatch(outputs)

    def _commit(self, each: Shard) -> None:
        outputs = each.waiting()
        if each is self.placement and self.checks:
            for output in outputs:
                self._check_leases(output.record)
                if isinstance(output.record, Assignment):
                    self._check_owner(output.record)
        try:
            each.commit()
        except ShardFenced:
            each.start()
            return
        given = [output.record for output in outputs if isinstance(output.record, Assignment) and self.checks]
        if each is self.placement and given:
            self._check_bound()
        elif each in self.rollouts:
            for record in given:
                assert record.lease > self._owners[record.trajectory_id].lease
                self._handed[record.trajectory_id] = record

    def _restart(self, each: Shard) -> None:
        """Crash with pending emissions, then start again."""
        each.crash()
        each.start()

    # -- invariants of every commit -----------------------------------------------------------------------------------

    def _check_dispatch(self, outputs: tuple[Output, ...]) -> None:
        fold = self.placement.fold
        outputs = tuple(output for output in outputs if isinstance(output.record, Assignment))
        seen = self.placement.seen(SETTLED) if outputs else []
        for output in outputs:
            assert output.record.trajectory_id not in {r.trajectory_id for r in seen}, "dispatched though settled"
            fresh = output.record.prompt.purpose == "train" and output.record.policy_version is None
            if fresh and self.shape.schedule != "partial_rollout":
                assert output.record.at_least >= fold._tracking.newest, "fresh work under old weights"  # type: ignore

    def _check_leases(self, record: object) -> None:
        leases = {Assignment: lambda r: (r.lease,), Release: lambda r: r.leases}.get(type(record), lambda r: ())(record)
        for lease in leases:
            assert lease > self._last_lease, f"lease {lease} does not rise"
            self._last_lease = lease

    def _check_owner(self, record: Assignment) -> None:
        name = record.trajectory_id
        before, handed = self._owners.get(name), self._handed.get(name)
        if before is not None and handed is not None and handed.lease > before.lease:
            told = (r.next_owner for r in self.placement.seen(PROGRESS) if isinstance(r, Progress))
            if handed.lease not in {to.lease for to in told if to is not None}:
                self._owners[name] = record
                return  # placement has not read of that owner yet
            before = handed
        refused = [r.lease for r in self.log.rows(PROGRESS) if isinstance(r, AssignmentRejected)]
        if before is not None and before.lease not in refused:
            process = before.replica // self.shape.replicas
            holder = self.log.committed(self.rollouts[process].config.group)
            alive = holder.start == before.incarnation and holder.holder is not None
            assert not alive, f"{name} goes to {record.replica}, but {before.replica} still has it"
        self._owners[name] = record

    def _check_bound(self) -> None:
        covered = max([-1, *(batch for version in self.log.rows(RELAY) for batch in version.batches)])
        done = {
            r.trajectory_id
            for r in self.log.rows(SETTLED)
            if r.outcome != "batched" or (r.batch is not None and r.batch <= covered)
        }
        out = {
            r.trajectory_id for r in self.log.rows(INBOX) if isinstance(r, Assignment) and r.prompt.purpose == "train"
        }
        assert len(out - done) <= self.shape.admitted + self.shape.samples - 1

    # -- invariants at the end ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Each trajectory was settled once, and only groups that do not fill a batch are left."""
        shape, log = self.shape, self.log
        assert self._fed == shape.prompts, "placement has not come to the end of the prompts"
        settled = log.rows(SETTLED)
        assert max(Counter(r.trajectory_id for r in settled).values()) == 1
        scored = [r.trajectory.trajectory_id for r in log.rows(EXPERIENCES)]
        assert len(scored) == len(set(scored))
        parts: list[MicroBatch] = log.rows(BATCHES)
        members = Counter(name for part in parts for name in part.trajectory_ids)
        assert max(members.values()) == 1
        assert sorted({part.batch for part in parts}) == list(range(max(part.batch for part in parts) + 1))
        sizes = Counter(part.batch for part in parts for _ in part.trajectory_ids)
        assert min(sizes.values()) >= shape.global_batch
        assert {r.trajectory_id for r in settled if r.outcome == "batched"} == set(members)
        groups: dict[int, set[int]] = {}
        for part in parts:
            for name in part.trajectory_ids:
                groups.setdefault(parse_trajectory_id(name).number, set()).add(part.batch)
        assert all(len(batches) == 1 for batches in groups.values()), "a group is in two batches"
        for record in log.rows(TRAJECTORIES):
            self._check_version(record)
        assert any(r.outcome == "failed" for r in settled), "nothing has failed: the run proves less than it should"
        asked = {f"{p.prompt_id}.{m}" for p in self._asked() for m in range(p.samples)}
        left = asked - {r.trajectory_id for r in settled}
        assert len(left) < shape.global_batch, f"never settled: {sorted(left)}"
        assert not [name for name in left if name.startswith("e")]
        assert left <= set(scored), "what is left is in the buffer"

    def _work_left(self) -> bool:
        """Whether any trajectory is unfinished, except those the buffer keeps for its next batch."""
        asked = {f"{p.prompt_id}.{m}" for p in self._asked() for m in range(p.samples)}
        left = asked - {r.trajectory_id for r in self.log.rows(SETTLED)}
        kept = len(left) < self.shape.global_batch and not [name for name in left if name.startswith("e")]
        scored = {r.trajectory.trajectory_id for r in self.log.rows(EXPERIENCES)}
        trained = {batch for version in self.log.rows(RELAY) for batch in version.batches}
        untrained = {part.batch for part in self.log.rows(BATCHES)} - trained
        return self._fed < self.shape.prompts or not kept or not left <= scored or bool(untrained)

    def _asked(self) -> Iterator[Prompt]:
        yield from self.log.rows(PROMPTS)
        yield from self.log.rows(EVAL_PROMPTS)

    def _check_version(self, record: Trajectory) -> None:
        if record.finish_reason != "failed":
            made_by = [span.version.number for span in record.version_spans for _ in range(span.length)]
            expected = [_token(number, position) for position, number in enumerate(made_by)]
            assert record.response.token_ids.to_pylist() == expected
            assert len(made_by) == self._length(record.trajectory_id), "cut short, or longer than it is"
        if self.shape.schedule != "partial_rollout":
            assert len(record.version_spans) <= 1
        if record.version_spans and record.prompt.policy_version is not None:
            assert {span.version for span in record.version_spans} == {record.prompt.policy_version}

    def _length(self, name: str) -> int:
        return 1 + zlib.crc32(name.encode()) % self.shape.longest

    # -- restore functions -------------------------------------------------------------------------------------------

    def _restore_placement(self, restored: Restored) -> ShardFold:
        shape = self.shape
        step = PlaceTrajectories(
            shape.placement,
            _placement_shard(),
            PARTITIONS,
            shape.admitted,
            shape.replicas,
            MAX_REPLICAS,
            shape.global_batch,
        )
        return PlacementFold(step, restored, self._fence, lambda: self.now, lambda: 0)

    def _fence(self, process: int) -> None:
        if process < len(self.rollouts):  # heartbeats may name a process that does not exist
            self.log.fence(self.rollouts[process].config.group)

    def _rollout_shard(self, process: int) -> object:
        hosted = range(process * self.shape.replicas, (process + 1) * self.shape.replicas)
        inbox = TopicInput(INBOX, tuple(hosted), start="latest")
        return shard("rollout", inbox, topic_input(RELAY), index=process)

    def _restore_rollout(self, process: int, restored: Restored) -> ShardFold:
        shape = self.shape
        config = RolloutConfig(
            processes=shape.processes,
            replicas=shape.replicas,
            step_s=0,
            linger_s=0,
            progress_tokens=shape.progress_tokens,
            progress_s=1.0,
        )
        replicas = [
            Replica(
                index,
                restored.start,
                self._engine(),
                self.weights,
                str,
                lambda: 0,
                config,
                interrupts=shape.placement.rules.refresh == "interrupt",
                clock=lambda: self.now,
            )
            for index in config.hosted(process)
        ]
        heartbeats, backend = SilentHeartbeats(), ScriptedBackend()
        return RolloutFold(config, replicas, heartbeats, backend, lambda: self.now, state=restored.state)  # type: ignore

    def _engine(self) -> ScriptedEngine:
        return ScriptedEngine(
            self.shape.slots,
            self._length,
            lambda name: zlib.crc32(b"failing" + name.encode()) % self.shape.failing == 0,
            kv_capacity=self.shape.kv_capacity,
            token=_token,
        )

    def _restore_evaluation(self, restored: Restored) -> ShardFold:
        questions = [prompt(n, 1, purpose="evaluation") for n in range(self.shape.questions)]
        return EvaluationFold(EvaluationConfig(every=2, periodic_questions=2), questions, restored, lambda: 0)


def _token(number: int, position: int) -> int:
    """The token of version `number` at a position, so that shifted, repeated or mixed tokens are detected."""
    return 1000 * number + position


def _placement_shard() -> object:
    topics = (PROMPTS, EVAL_PROMPTS, PROGRESS, TRAJECTORIES, SETTLED)
    committed = (topic_input(topic, blocks=topic is TRAJECTORIES) for topic in topics)
    heartbeats = topic_input(REPLICAS, start="latest", keys=("rollout-",))
    return shard("placement", *committed, topic_input(RELAY), heartbeats, ledger=("inbox",))


def _restore_score(restored: Restored) -> ShardFold:
    config = ScoreConfig(rewards=[RewardSpec("exact")])
    ledger = TrajectoryLedger(PARTITIONS, restored.state.get("scored"))
    for scored in (received.record.trajectory for received in restored.ledger):
        ledger.add(parse_trajectory_id(scored.trajectory_id), scored.prompt.samples, 0)
    judge = SimpleNamespace(
        config=config,
        rubric=lambda task: config,
        judge=lambda rows: [[VerifierResult(1.0, None)] for _ in rows],
        close=lambda: None,
    )
    return _Scoring(judge, ledger, ScoreCounters(restored.group, restored.state.get("counts")), lambda: 0)  # type: ignore[arg-type]
