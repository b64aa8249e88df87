"""Folds a run's topics into the outcome of each trajectory. Pure; it reads no topic.

Add complete topics in this order, as each needs the ones before it: relay, settled, batches, experiences, trajectories,
inbox, prompts. A dictionary maps each trajectory, as a packed integer key, to its facts, as bits of one integer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from operators.io.validation import MAX_PROMPTS_AHEAD
from pipelines.inspect.audit.result import Audit, AuditStage, ReachedStage
from pipelines.inspect.audit.trim_points import TrimmedHistory
from schemas.identity import LETTERS, Purpose, TrajectoryKey, parse_trajectory_id, trajectory_id
from schemas.records import MicroBatch, PolicyVersion, Prompt, Settled, WeightVersion

# The facts about a trajectory, as bits of one integer. The bits above hold the batch of its Settled record, plus one.
_DISPATCHED = 1 << 0
_FINISHED = 1 << 1
_FINISHED_CONSUMED = 1 << 2  # score's restore offset is beyond its Trajectory
_SCORED = 1 << 3
_SCORED_CONSUMED = 1 << 4  # the consumer's restore offset is beyond its Experience
_SETTLED = 1 << 5
_IN_BATCH = 1 << 6
_IN_ITS_BATCH = 1 << 7  # in the batch that its Settled record names
_TRAINED = 1 << 8
_TRAINED_AGAIN = 1 << 9
_NO_REASON = 1 << 10
_PROMPT_CONSUMED = 1 << 11  # placement's restore offset is beyond its Prompt; no other record names it
_OUTCOME_AT = 12
_BATCH_AT = 15

_PURPOSES: tuple[Purpose, ...] = tuple(LETTERS)
_PURPOSE_BITS = 2
_OUTCOMES = ("batched", "dropped", "failed", "evaluated", "imported")
_MEMBER_BITS = 20
_MEMBERS = (1 << _MEMBER_BITS) - 1 << _PURPOSE_BITS
ENDED = frozenset({"trained", "untrained", "dropped", "failed", "evaluated", "imported"})
"""Final outcomes of a trajectory."""


class AuditFold:
    """The facts about a run's trajectories. `trimmed`: topics (short names) from which retention has deleted records.

    `before`: the trimmed part of the log, whose trajectories the trim point counts. Remaining records of them are
    ignored, except a later batch that trains one of them again. `written`: the next prompt numbers that their writers
    have committed, by purpose. A higher number that does not follow the last one is of another program.
    """

    def __init__(
        self,
        trimmed: Collection[str] = (),
        before: TrimmedHistory | None = None,
        written: Mapping[Purpose, int] = MappingProxyType({}),
    ) -> None:
        self._trimmed = frozenset(trimmed)
        self._before = before
        closed = before.closed_below if before is not None else {}
        self._closed_below = tuple(closed.get(purpose, 0) for purpose in _PURPOSES)
        self._trained_after_close: set[int] = set()
        self._next_prompt: dict[Purpose, int] = {}
        self._written = written
        self._missing_prompts: set[int] = set()
        """The keys of sample 0 of the prompts whose numbers the log lacks so far."""
        self._bits: dict[int, int] = {}
        self._manifests: dict[PolicyVersion, tuple[PolicyVersion | None, tuple[int, ...]]] = {}
        self._untrained: set[int] = set()
        self._times_trained: Counter[int] | None = None
        self._lineage_is_cut = False
        self.duplicate_finishes = 0
        self.settled_again = 0
        self.undecodable = 0

    def manifest(self, record: WeightVersion) -> None:
        """Add a manifest; a later record of the same version replaces the earlier one."""
        self._manifests[record.version] = (record.parent, record.batches)
        self._untrained.update(record.untrained_batches)

    def settled(self, record: Settled) -> None:
        """Add the settlement of a trajectory. The first counts."""
        key = _key(record.trajectory_id)
        bits = self._bits.get(key, 0)
        if self._is_closed(key):
            return
        if bits & _SETTLED:
            self.settled_again += 1
            return
        bits |= _SETTLED | _OUTCOMES.index(record.outcome) << _OUTCOME_AT
        if record.batch is not None:
            bits |= record.batch + 1 << _BATCH_AT
        if not record.reason.strip():
            bits |= _NO_REASON
        self._bits[key] = bits

    def batch(self, record: MicroBatch) -> None:
        """Add a part of a global batch, which was trained as often as the ancestor line names its batch."""
        times = self._times_trained_by_batch()[record.batch]
        for name in record.trajectory_ids:
            key = _key(name)
            bits = self._bits.get(key, 0)
            if self._is_closed(key):
                if times and self._before is not None and record.batch > self._before.batch:
                    self._trained_after_close.add(key)
                continue
            if times > 1 or (times and bits & _TRAINED):
                bits |= _TRAINED_AGAIN
            bits |= _IN_BATCH | (_TRAINED if times else 0)
            if bits >> _BATCH_AT == record.batch + 1:
                bits |= _IN_ITS_BATCH
            self._bits[key] = bits

    def experience(self, key: TrajectoryKey, *, consumed: bool) -> None:
        """Add a scored trajectory; `consumed`: the restore offset of its consumer is beyond it."""
        self._add(key, _SCORED | (_SCORED_CONSUMED if consumed else 0))

    def trajectory(self, trajectory: TrajectoryKey, *, consumed: bool) -> None:
        """Add a finished trajectory; `consumed`: score's restore offset is beyond it. The first counts."""
        key = _packed_key(trajectory)
        bits = self._bits.get(key, 0)
        if self._is_closed(key):
            return
        if bits & _FINISHED:
            self.duplicate_finishes += 1
            return
        self._bits[key] = bits | _FINISHED | (_FINISHED_CONSUMED if consumed else 0)

    def assignment(self, key: TrajectoryKey) -> None:
        """Add a dispatch; later assignments of the same trajectory do not count."""
        self._add(key, _DISPATCHED)

    def prompt(self, record: Prompt, *, consumed: bool) -> None:
        """Add a prompt; `consumed`: placement's restore offset is beyond it, so each of its trajectories was dispatched
        or has ended.
        """
        purpose, number = record.purpose, record.number
        first = number if {"prompts", "eval-prompts"} & self._trimmed else self._closed_below[_PURPOSES.index(purpose)]
        expected = self._next_prompt.get(purpose, first)
        is_foreign = number > expected and number >= self._written.get(purpose, number + 1)
        if purpose == "imported" or number > expected + MAX_PROMPTS_AHEAD or is_foreign:
            self.undecodable += 1
            return
        if self._before is None or purpose in self._next_prompt:  # after a trim the first may have any number
            missing = (TrajectoryKey(purpose, each, 0) for each in range(expected, number))
            self._missing_prompts.update(map(_packed_key, missing))
        self._missing_prompts.discard(_packed_key(TrajectoryKey(purpose, number, 0)))
        self._next_prompt[purpose] = max(expected, number + 1)
        for member in range(record.samples if consumed else 0):
            key = _packed_key(TrajectoryKey(purpose, number, member))
            if key not in self._bits and not self._is_closed(key):
                self._bits[key] = _PROMPT_CONSUMED

    def audit(self, *, name_in_flight: bool = False) -> Audit:
        """The audit's result. `name_in_flight`: also name the trajectories in flight."""
        counts: Counter[str] = Counter(self._before.counts if self._before is not None else {})
        counts.update(
            duplicate_finishes=self.duplicate_finishes, settled_again=self.settled_again, undecodable=self.undecodable
        )
        in_flight: Counter[AuditStage] = Counter()
        lost, still_in_flight = self._lost_prompts(), []
        counts["undispatched"] += len(lost)
        for key, bits in sorted(self._bits.items()) if name_in_flight else self._bits.items():
            outcome, stage = self._outcome_and_stage(key, bits)
            counts["dispatched" if bits & _DISPATCHED else "undispatched"] += 1
            if outcome == "lost":
                lost.append((key, stage))
            elif outcome == "in_flight":
                in_flight[stage] += 1
                if name_in_flight:
                    still_in_flight.append(ReachedStage(_name(key), stage))
            else:
                counts[outcome] += 1
        return Audit(
            **counts,
            in_flight=dict(in_flight),
            lost=tuple(ReachedStage(_name(key), stage) for key, stage in sorted(lost)),
            trained_twice=self._names(
                {*self._trained_after_close, *(key for key, bits in self._bits.items() if bits & _TRAINED_AGAIN)}
            ),
            without_reason=self._names(key for key, bits in self._bits.items() if _dropped_without_reason(bits)),
            contradictions=self._names(key for key, bits in self._bits.items() if _has_contradiction(key, bits)),
            still_in_flight=tuple(still_in_flight),
        )

    def closed_below(self, batch: int) -> dict[Purpose, int]:
        """By purpose: the number below which all trajectories in the topics have ended, and trained ones are in a batch
        up to `batch`.
        """
        bounds, first_active = dict(zip(_PURPOSES, self._closed_below, strict=True)), dict[Purpose, int]()
        for key, bits in self._bits.items():
            purpose, number = _purpose(key), key >> _PURPOSE_BITS + _MEMBER_BITS
            outcome, _ = self._outcome_and_stage(key, bits)
            is_batched = bits & _TRAINED or outcome == "untrained"
            ended = outcome in ENDED and (not is_batched or (bits & _IN_ITS_BATCH and (bits >> _BATCH_AT) - 1 <= batch))
            if ended:
                bounds[purpose] = max(bounds[purpose], number + 1)
            else:
                first_active[purpose] = min(number, first_active.get(purpose, number))
        return {
            purpose: min(bound, first_active.get(purpose, bound), self._next_prompt.get(purpose, bound))
            for purpose, bound in bounds.items()
        }

    def is_closed(self, key: TrajectoryKey) -> bool:
        """Whether a trajectory had ended before the trim point."""
        return self._is_closed(_packed_key(key))

    def last_batch(self, version: PolicyVersion) -> int:
        """The last batch on the ancestor line of `version`; -1: none."""
        return max((batch for each in self._line_of(version) for batch in self._manifests[each][1]), default=-1)

    def is_in_lineage(self, version: PolicyVersion) -> bool:
        """Whether `version` is the newest version or one of its ancestors."""
        return version in self._line_of(max(self._manifests, default=None))

    def _line_of(self, version: PolicyVersion | None) -> list[PolicyVersion]:
        """`version` and its ancestors, down to the first manifest in the log."""
        line: dict[PolicyVersion, None] = {}
        while version in self._manifests and version not in line:
            line[version] = None
            version = self._manifests[version][0]
        return list(line)

    def _is_closed(self, key: int) -> bool:
        return key >> _PURPOSE_BITS + _MEMBER_BITS < self._closed_below[key & (1 << _PURPOSE_BITS) - 1]

    def _outcome_and_stage(self, key: int, bits: int) -> tuple[str, AuditStage]:
        """The outcome of a trajectory, and the stage that has or lost it if it has not ended."""
        stage_after_score: AuditStage = "evaluation" if _purpose(key) == "evaluation" else "experience"
        if bits & _TRAINED:
            return "imported" if _purpose(key) == "imported" else "trained", "training"
        if bits & _SETTLED and _outcome(bits) != _outcome_in_batch(key):
            return _outcome(bits), stage_after_score
        if bits & _IN_BATCH:
            return self._batched_outcome(bits)
        if bits & _SETTLED:  # settled as batched, but in no batch
            return self._lost_or_expired("batches"), "experience"
        if bits & _SCORED:
            return (self._lost_or_expired("settled") if bits & _SCORED_CONSUMED else "in_flight"), stage_after_score
        if bits & _FINISHED:
            return (self._lost_or_expired("experiences") if bits & _FINISHED_CONSUMED else "in_flight"), "score"
        if bits & _PROMPT_CONSUMED:
            return self._lost_or_expired("inbox"), "placement"
        return "in_flight", "generation"

    def _batched_outcome(self, bits: int) -> tuple[str, AuditStage]:
        """The outcome of a trajectory in an untrained batch: in flight, unless the ancestor line skips that batch."""
        if bits & _SETTLED and not bits & _IN_ITS_BATCH:
            return self._lost_or_expired("batches"), "experience"
        batch, times = (bits >> _BATCH_AT) - 1, self._times_trained_by_batch()
        if bits & _IN_ITS_BATCH and batch in self._untrained and times.get(batch) == 0:
            return "untrained", "training"
        if not bits & _IN_ITS_BATCH or not times or batch > max(times):
            return "in_flight", "training"
        return ("expired" if self._lineage_is_cut and batch < min(times) else "lost"), "training"

    def _lost_or_expired(self, topic: str) -> str:
        """The outcome of a trajectory that is missing from `topic`."""
        return "expired" if topic in self._trimmed else "lost"

    def _times_trained_by_batch(self) -> Counter[int]:
        """How often each batch is trained on the ancestor line of the newest manifest. Computed at the first call."""
        if self._times_trained is None:
            line = self._line_of(max(self._manifests, default=None))
            self._times_trained = Counter(batch for version in line for batch in self._manifests[version][1])
            for batch in self._untrained & self._times_trained.keys():
                self._times_trained[batch] = 0
            goes_on = bool(line) and self._manifests[line[-1]][0] is not None
            self._lineage_is_cut = goes_on and (self._before is None or self._before.version not in line)
        return self._times_trained

    def _lost_prompts(self) -> list[tuple[int, AuditStage]]:
        """The prompts that the log lacks, by the key of their sample 0, with the stage that numbers them."""
        known = {key | _MEMBERS for key in self._bits} if self._missing_prompts else set()
        missing = (key for key in self._missing_prompts if key | _MEMBERS not in known and not self._is_closed(key))
        return [(key, "evaluation" if _purpose(key) == "evaluation" else "prompts") for key in missing]

    def _add(self, trajectory: TrajectoryKey, bits: int) -> None:
        key = _packed_key(trajectory)
        if self._is_closed(key):
            return
        self._bits[key] = self._bits.get(key, 0) | bits

    def _names(self, keys: Iterable[int]) -> tuple[str, ...]:
        return tuple(map(_name, sorted(keys)))


def _outcome(bits: int) -> str:
    return _OUTCOMES[bits >> _OUTCOME_AT & 7]


def _dropped_without_reason(bits: int) -> bool:
    return bool(bits & _SETTLED and bits & _NO_REASON and not bits & _TRAINED) and _outcome(bits) == "dropped"


def _has_contradiction(key: int, bits: int) -> bool:
    return bool(bits & _TRAINED and bits & _SETTLED) and _outcome(bits) != _outcome_in_batch(key)


def _outcome_in_batch(key: int) -> str:
    """The settled outcome of a trajectory in a batch."""
    return "imported" if _purpose(key) == "imported" else "batched"


def _key(name: str) -> int:
    """The key of a trajectory id. Raises ValueError."""
    return _packed_key(parse_trajectory_id(name))


def _packed_key(key: TrajectoryKey) -> int:
    """The key as an integer that sorts by number, then member, then purpose."""
    purpose, number, member = key
    return (number << _MEMBER_BITS | member) << _PURPOSE_BITS | _PURPOSES.index(purpose)


def _purpose(key: int) -> Purpose:
    return _PURPOSES[key & (1 << _PURPOSE_BITS) - 1]


def _name(key: int) -> str:
    number, member = divmod(key >> _PURPOSE_BITS, 1 << _MEMBER_BITS)
    return trajectory_id(_purpose(key), number, member)
