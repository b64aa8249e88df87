"""ARCHITECTURE's invariants of a run, checked at every commit on the records that become visible.

The checks know the records alone. They share no code with the ledgers, leases and notes of the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from infra.kafka.note import Note
from infra.kafka.properties import ClientProperties
from infra.kafka.simulated_inspection import InspectionClients
from infra.simulation.cluster import SimulatedCluster
from operators.rollout.emulated_rows import synthetic_response
from operators.rollout.engine import Request
from pipelines.config import Config
from pipelines.inspect.audit.audit_run import audit
from pipelines.inspect.audit.decode import DecodedRecord
from pipelines.inspect.audit.result import Audit
from pipelines.simulate.observer import Committed
from schemas.codec import UndecodableRecord
from schemas.identity import parse_trajectory_id, trajectory_id
from schemas.records import (
    Assignment,
    CommitNote,
    DeadLetter,
    MicroBatch,
    Pause,
    PolicyVersion,
    Prompt,
    Settled,
    Trajectory,
    WeightVersion,
)
from schemas.topics import CONTROL, group_name


class InvariantViolated(Exception):
    """A record that no correct run would write. The message says which, and what it contradicts."""


class Invariants:
    """The facts of a run's records so far. `add` raises InvariantViolated."""

    def __init__(self, config: Config, *, calm: bool = False) -> None:
        """Without faults, in a `calm` run, no response fails."""
        self._config, self._calm = config, calm
        self._interrupts = config.placement.rules.refresh == "interrupt"
        self.prompts: dict[str, int] = {}
        """The next prompt number by topic."""
        self.asked: dict[str, int] = {}
        """The members of each prompt, by its id."""
        self.settled: dict[str, Settled] = {}
        self.scored: set[str] = set()
        self.finished: set[str] = set()
        self.batches: dict[int, set[str]] = {}
        self.members: dict[str, int] = {}
        """The batch of each trajectory."""
        self.manifests: dict[PolicyVersion, WeightVersion] = {}
        self.covered: set[int] = set()
        """Batches that a manifest covers."""
        self._out: set[str] = set()
        """Training trajectories assigned and not done."""
        self._owners: dict[str, Assignment] = {}
        self._leases: dict[int, tuple[str, int, int]] = {}
        self._pauses: list[Pause] = []
        """By offset in the topic `control`."""
        self._control_read = self._control_read_before = 0
        """The next offset of that topic that placement has read, by its last note and the one before."""
        self._notes: dict[str, Note] = {}
        self._parts: dict[int, MicroBatch] = {}
        self._next_batch: dict[int, int] = {}
        self._handlers: dict[type, Callable[[Committed, Any], None]] = {
            Prompt: self._prompt,
            Assignment: self._assignment,
            Trajectory: self._trajectory,
            DecodedRecord: self._experience,
            Settled: self._settle,
            MicroBatch: self._batch,
            WeightVersion: self._manifest,
            DeadLetter: self._dead_letter,
            UndecodableRecord: self._undecodable,
            CommitNote: self._note,
            Pause: self._pause,
        }

    def add(self, committed: Committed) -> None:
        """Check a record against those before it."""
        handler = self._handlers.get(type(committed.record))
        if handler is not None:
            handler(committed, committed.record)

    @property
    def open(self) -> set[str]:
        """The trajectories of all prompts that are not settled."""
        return {
            f"{prompt}.{member}"
            for prompt, samples in self.asked.items()
            for member in range(samples)
            if f"{prompt}.{member}" not in self.settled
        }

    @property
    def assigned(self) -> int:
        """The number of trajectories that were assigned."""
        return len(self._owners)

    @property
    def placement_started(self) -> bool:
        """Whether placement has committed a note."""
        return group_name(self._config.run.name, "placement") in self._notes

    @property
    def final(self) -> bool:
        """Whether the final version has been published: that of the present goal."""
        goal = self._config.trainer.optimizer_steps
        return any(manifest.final and manifest.version.number >= goal for manifest in self.manifests.values())

    def extend(self, config: Config) -> None:
        """The run goes on with `config`, which has a later goal."""
        self._config = config

    def _prompt(self, where: Committed, prompt: Prompt) -> None:
        expected = self.prompts.get(where.topic, 0)
        if prompt.number != expected:
            raise InvariantViolated(f"{where.topic} has number {prompt.number} where {expected} is next")
        self.prompts[where.topic] = expected + 1
        self.asked[prompt.prompt_id] = prompt.samples

    def _assignment(self, where: Committed, record: Assignment) -> None:
        name, to = record.trajectory_id, (record.trajectory_id, record.replica, record.incarnation)
        if self._leases.setdefault(record.lease, to) != to:
            raise InvariantViolated(f"lease {record.lease} of {name} was given to {self._leases[record.lease]} before")
        before = self._owners.get(name)
        if before is None and self._placement_knows_pause():
            raise InvariantViolated(f"{name} was assigned although placement knows that the run is paused")
        if before is None or record.lease > before.lease:
            self._owners[name] = record
        elif before.lease == record.lease:
            raise InvariantViolated(f"{name} was assigned twice under lease {record.lease}")
        if name in self.settled:
            raise InvariantViolated(f"{name} was assigned although it is settled: {self.settled[name].outcome}")
        if record.prompt.purpose == "train":
            self._out.add(name)
            self._check_admission()

    def _pause(self, where: Committed, request: Pause) -> None:
        self._pauses.append(request)

    def _placement_knows_pause(self) -> bool:
        """Whether the run is paused, and placement committed an emission after it had read so: a restart knows it, too.

        The newest note may be of the assignment's own transaction, whose markers are written in any order, and which
        may have decided before it read the request. So the note before that one counts.
        """
        return bool(self._pauses) and self._pauses[-1].paused and self._control_read_before >= len(self._pauses)

    def _check_admission(self) -> None:
        most = self._config.admitted + self._config.prompts.mixture[0].samples_per_prompt - 1
        if len(self._out) > most:
            raise InvariantViolated(f"{len(self._out)} trajectories are outstanding, where {most} are admitted")

    def _trajectory(self, where: Committed, record: Trajectory) -> None:
        name = record.trajectory_id
        self.finished.add(name)
        count = len(record.response.token_ids)
        if record.finish_reason == "failed":
            if self._calm:
                raise InvariantViolated(f"{name} has failed without a fault: {record.error}")
            return
        owner = self._owners.get(name)
        if owner is None or record.lease > owner.lease:
            raise InvariantViolated(f"{name} was finished under lease {record.lease}, which nobody was given")
        if record.lease < owner.lease:
            raise InvariantViolated(f"{name} was finished under lease {record.lease}, after lease {owner.lease} began")
        versions = {span.version for span in record.version_spans}
        if sum(span.length for span in record.version_spans) != count:
            raise InvariantViolated(f"{name} has {count} tokens, but its version spans have another number")
        if len(versions) != 1 and not self._interrupts:
            raise InvariantViolated(f"{name} was generated under {len(versions)} versions: {sorted(versions)}")
        if record.prompt.policy_version is not None and versions != {record.prompt.policy_version}:
            raise InvariantViolated(f"{name} is of {record.prompt.policy_version}, generated under {sorted(versions)}")
        request = Request(name, record.prompt.token_ids.to_numpy(), record.prompt.sampling)
        vocabulary, stopped = self._config.rollout.emulation.vocabulary, record.finish_reason == "stop"
        expected = synthetic_response(request, 0, count, vocabulary, stopped)
        if record.response.token_ids.to_pylist() != expected.token_ids.tolist():
            raise InvariantViolated(f"{name}: tokens are missing, repeated or of another trajectory")

    def _experience(self, where: Committed, record: DecodedRecord) -> None:
        name = trajectory_id(*record.key)
        if name in self.scored:
            raise InvariantViolated(f"{name} was scored twice")
        if name not in self.finished:
            raise InvariantViolated(f"{name} was scored before it was finished")
        self.scored.add(name)

    def _settle(self, where: Committed, record: Settled) -> None:
        name = record.trajectory_id
        if name in self.settled:
            raise InvariantViolated(f"{name} was settled twice: {self.settled[name].outcome}, then {record.outcome}")
        self.settled[name] = record
        if record.outcome != "batched" or record.batch in self.covered:
            self._out.discard(name)

    def _batch(self, where: Committed, part: MicroBatch) -> None:
        expected = self._next_batch.get(where.partition, 0)
        before = self._parts.get(where.partition)
        index = 0 if before is None else before.index + 1
        if (part.batch, part.index) != (expected, index):
            raise InvariantViolated(
                f"batches-{where.partition} has part {part.index} of batch {part.batch}, where part {index} of "
                f"batch {expected} is next"
            )
        self._check_age(part)
        for name in part.trajectory_ids:
            if name in self.members:
                raise InvariantViolated(f"{name} is in batches {self.members[name]} and {part.batch}")
            self.members[name] = part.batch
        self.batches.setdefault(part.batch, set()).update(part.trajectory_ids)
        whole = part.index + 1 == part.count
        self._next_batch[where.partition] = expected + whole
        self._parts.pop(where.partition, None)
        if not whole:
            self._parts[where.partition] = part

    def _check_age(self, part: MicroBatch) -> None:
        """Check the bound that `over_age = "drop"` and `"wait"` guarantee."""
        experience = self._config.experience
        oldest = max(part.staleness.to_pylist(), default=0)
        if experience.over_age != "correct" and oldest > experience.max_staleness:
            raise InvariantViolated(
                f"batch {part.batch} has a trajectory {oldest} versions old, above max_staleness "
                f"{experience.max_staleness} with over_age {experience.over_age!r}"
            )

    def _manifest(self, where: Committed, manifest: WeightVersion) -> None:
        before = self.manifests.setdefault(manifest.version, manifest)
        if (before.parent, before.batches) != (manifest.parent, manifest.batches):
            raise InvariantViolated(f"version {manifest.version} was published twice, with different batches")
        if manifest.parent is not None and manifest.parent not in self.manifests:
            raise InvariantViolated(f"version {manifest.version} has parent {manifest.parent}, which is not published")
        unknown = [batch for batch in manifest.batches if batch not in self.batches]
        if unknown:
            raise InvariantViolated(f"version {manifest.version} has batches {unknown}, which were not written")
        self.covered.update(manifest.batches)
        self._out = {
            name for name in self._out if name not in self.settled or self.settled[name].batch not in self.covered
        }

    def _dead_letter(self, where: Committed, letter: DeadLetter) -> None:
        raise InvariantViolated(f"a dead letter of {letter.topic}: {letter.step}: {letter.reason}")

    def _undecodable(self, where: Committed, error: UndecodableRecord) -> None:
        raise InvariantViolated(f"{where.topic}-{where.partition} offset {where.offset} cannot be decoded: {error}")

    def _note(self, where: Committed, record: CommitNote) -> None:
        note = Note.decode(record.note)
        before = self._notes.get(record.group, Note(commit=-1))
        of_layout = before.sealed and not note.sealed and (note.start, note.commit) == (before.start, before.commit)
        if (note.start, note.commit) <= (before.start, before.commit) and not of_layout:
            raise InvariantViolated(
                f"{record.group}: note {note.start}.{note.commit} follows note {before.start}.{before.commit}"
            )
        self._notes[record.group] = note
        if record.group == group_name(self._config.run.name, "placement"):
            read = note.offsets.get(f"{CONTROL.name(self._config.run.name)}:0", 0)
            self._control_read_before, self._control_read = self._control_read, max(self._control_read, read)

    def state_lines(self) -> Iterator[str]:
        """The state that the records show so far: positions, versions, what is open and outstanding."""
        for group, note in sorted(self._notes.items()):
            positions = ", ".join(f"{place.partition('.')[2] or place} {at}" for place, at in note.offsets.items())
            yield f"{group}: start {note.start}, commit {note.commit}; reads on from {positions or 'nothing'}"
        newest = max(self.manifests, default=None)
        yield f"versions: {len(self.manifests)}, the newest is {newest}"
        yield f"batches: {len(self.batches)}, of which {len(self.covered)} are trained"
        for name, found in (("not settled", self.open), ("outstanding", self._out)):
            yield f"{name}: {len(found)}" + "".join(f" {each}" for each in sorted(found)[:20])

    def check_end(self) -> None:
        """Check what must hold once all work has ended."""
        for name, batch in self.members.items():
            settled = self.settled.get(name)
            if settled is None or settled.batch != batch:
                raise InvariantViolated(f"{name} is in batch {batch}, but settled as {settled}")
        for name, settled in self.settled.items():
            if settled.outcome == "batched" and name not in self.members:
                raise InvariantViolated(f"{name} was settled in batch {settled.batch}, which does not contain it")
            if parse_trajectory_id(name).purpose == "evaluation" and settled.outcome == "batched":
                raise InvariantViolated(f"{name} is an evaluation, but was settled in a batch")
        smallest = min((len(names) for names in self.batches.values()), default=self._config.experience.global_batch)
        if smallest < self._config.experience.global_batch:
            raise InvariantViolated(f"a batch has {smallest} trajectories, below the global batch")


def audit_cluster(cluster: SimulatedCluster, run: str) -> Audit:
    """The audit of run `run`."""
    return audit(ClientProperties.of_clients(InspectionClients(cluster)), run)
