"""The fold of a run's topics into what became of each trajectory. Pure; it knows no operator and reads no topic.

Feed it whole topics in this order: relay, settled, batches, experiences, trajectories, inbox (each needs what those
before it say). An id and all that is known of it are two integers in one dictionary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from pipelines.inspect.audit.result import Audit, ReachedStage, Stage
from pipelines.inspect.audit.trim_points import TrimmedHistory
from schemas.identity import LETTERS, Purpose, TrajectoryKey, parse_trajectory_id, trajectory_id
from schemas.records import MicroBatch, PolicyVersion, Settled, WeightVersion

# What is known of a trajectory, as bits of one integer; above them stands the batch that Settled names, plus one.
_DISPATCHED = 1 << 0
_FINISHED = 1 << 1
_FINISHED_DONE = 1 << 2  # score's restore offset is beyond its Trajectory
_SCORED = 1 << 3
_SCORED_DONE = 1 << 4  # the restore offset of who eats its Experience is beyond it
_SETTLED = 1 << 5
_IN_BATCH = 1 << 6
_IN_ITS_BATCH = 1 << 7  # in the batch that its Settled names
_TRAINED = 1 << 8
_TRAINED_AGAIN = 1 << 9
_NO_REASON = 1 << 10
_OUTCOME_AT = 11
_BATCH_AT = 14

_PURPOSES: tuple[Purpose, ...] = tuple(LETTERS)
_PURPOSE_BITS = 2
_OUTCOMES = ("batched", "dropped", "failed", "evaluated", "imported")
_MEMBER_BITS = 20
ENDED = frozenset({"trained", "untrained", "dropped", "failed", "evaluated", "imported"})
"""What becomes of a trajectory for good."""


class AuditFold:
    """What a run's topics say of its trajectories. `trimmed` names the topics (nouns) that retention has cut.

    After a trim of the log what had ended `before` is counted as its trim point says; records of it that are left count
    no more, but for a later batch that trains one of them again.
    """

    def __init__(self, trimmed: Collection[str] = (), before: TrimmedHistory | None = None) -> None:
        self._trimmed = frozenset(trimmed)
        self._before = before
        closed = before.closed_below if before is not None else {}
        self._closed_below = tuple(closed.get(purpose, 0) for purpose in _PURPOSES)
        self._trained_after_all: set[int] = set()
        self._known: dict[int, int] = {}
        self._manifests: dict[PolicyVersion, tuple[PolicyVersion | None, tuple[int, ...]]] = {}
        self._untrained: set[int] = set()
        self._times_trained: Counter[int] | None = None
        self._line_is_cut = False
        self.duplicate_finishes = 0
        self.settled_again = 0
        self.undecodable = 0

    def manifest(self, record: WeightVersion) -> None:
        """A version in the relay topic; a later record of the same version replaces the earlier."""
        self._manifests[record.version] = (record.parent, record.batches)
        self._untrained.update(record.untrained_batches)

    def settled(self, record: Settled) -> None:
        """The end of a story. The first counts."""
        key = _key(record.trajectory_id)
        known = self._known.get(key, 0)
        if self._is_closed(key):
            return
        if known & _SETTLED:
            self.settled_again += 1
            return
        known |= _SETTLED | _OUTCOMES.index(record.outcome) << _OUTCOME_AT
        if record.batch is not None:
            known |= record.batch + 1 << _BATCH_AT
        if not record.reason.strip():
            known |= _NO_REASON
        self._known[key] = known

    def batch(self, record: MicroBatch) -> None:
        """A part of a global batch, trained as often as the line names its batch."""
        times = self._line()[record.batch]
        for name in record.trajectory_ids:
            key = _key(name)
            known = self._known.get(key, 0)
            if self._is_closed(key):
                if times and self._before is not None and record.batch > self._before.batch:
                    self._trained_after_all.add(key)
                continue
            if times > 1 or (times and known & _TRAINED):
                known |= _TRAINED_AGAIN
            known |= _IN_BATCH | (_TRAINED if times else 0)
            if known >> _BATCH_AT == record.batch + 1:
                known |= _IN_ITS_BATCH
            self._known[key] = known

    def experience(self, key: TrajectoryKey, *, done: bool) -> None:
        """A scored trajectory; `done` when the restore offset of who eats it is beyond it."""
        self._add(key, _SCORED | (_SCORED_DONE if done else 0))

    def trajectory(self, trajectory: TrajectoryKey, *, done: bool) -> None:
        """A finished trajectory; `done` when score's restore offset is beyond it. The first counts."""
        key = _packed(trajectory)
        known = self._known.get(key, 0)
        if self._is_closed(key):
            return
        if known & _FINISHED:
            self.duplicate_finishes += 1
            return
        self._known[key] = known | _FINISHED | (_FINISHED_DONE if done else 0)

    def assignment(self, key: TrajectoryKey) -> None:
        """A dispatch; every later one of the same trajectory is the same dispatch."""
        self._add(key, _DISPATCHED)

    def audit(self, *, name_in_flight: bool = False) -> Audit:
        """The balance. `name_in_flight` names what is in flight, too."""
        counts: Counter[str] = Counter(self._before.counts if self._before is not None else {})
        counts.update(
            duplicate_finishes=self.duplicate_finishes, settled_again=self.settled_again, undecodable=self.undecodable
        )
        in_flight: Counter[Stage] = Counter()
        lost, waiting = [], []
        for key, known in sorted(self._known.items()) if name_in_flight else self._known.items():
            what, stage = self._class_of(key, known)
            counts["dispatched" if known & _DISPATCHED else "undispatched"] += 1
            if what == "lost":
                lost.append((key, stage))
            elif what == "in_flight":
                in_flight[stage] += 1
                if name_in_flight:
                    waiting.append(ReachedStage(_name(key), stage))
            else:
                counts[what] += 1
        return Audit(
            **counts,
            in_flight=dict(in_flight),
            lost=tuple(ReachedStage(_name(key), stage) for key, stage in sorted(lost)),
            trained_twice=self._names(
                {*self._trained_after_all, *(key for key, known in self._known.items() if known & _TRAINED_AGAIN)}
            ),
            without_reason=self._names(key for key, known in self._known.items() if _dropped_without_reason(known)),
            contradictions=self._names(key for key, known in self._known.items() if _contradicts(key, known)),
            still_in_flight=tuple(waiting),
        )

    def closed_below(self, batch: int) -> dict[Purpose, int]:
        """By purpose: the number below which every trajectory that any topic names has ended, trained ones in a batch
        up to `batch`.
        """
        floors, after = dict(zip(_PURPOSES, self._closed_below, strict=True)), dict[Purpose, int]()
        for key, known in self._known.items():
            purpose, number = _purpose(key), key >> _PURPOSE_BITS + _MEMBER_BITS
            what, _ = self._class_of(key, known)
            is_batched = known & _TRAINED or what == "untrained"
            ended = what in ENDED and (not is_batched or (known & _IN_ITS_BATCH and (known >> _BATCH_AT) - 1 <= batch))
            if ended:
                floors[purpose] = max(floors[purpose], number + 1)
            else:
                after[purpose] = min(number, after.get(purpose, number))
        return {purpose: min(floor, after.get(purpose, floor)) for purpose, floor in floors.items()}

    def is_closed(self, key: TrajectoryKey) -> bool:
        """Whether a trajectory had ended before the trim point."""
        return self._is_closed(_packed(key))

    def last_batch(self, version: PolicyVersion) -> int:
        """The last batch on the ancestor line of `version`; -1: none."""
        last, seen, at = -1, set[PolicyVersion](), version
        while at in self._manifests and at not in seen:
            seen.add(at)
            parent, batches = self._manifests[at]
            last = max([last, *batches])
            if parent is None:
                break
            at = parent
        return last

    def is_on_the_line(self, version: PolicyVersion) -> bool:
        """Whether `version` is an ancestor of the newest version, or that itself."""
        at, seen = max(self._manifests, default=None), set[PolicyVersion]()
        while at in self._manifests and at not in seen and at != version:
            seen.add(at)
            at = self._manifests[at][0]
        return at == version and at in self._manifests

    def _is_closed(self, key: int) -> bool:
        return key >> _PURPOSE_BITS + _MEMBER_BITS < self._closed_below[key & (1 << _PURPOSE_BITS) - 1]

    def _class_of(self, key: int, known: int) -> tuple[str, Stage]:
        """What became of a trajectory, and at which stage it is where that is not the end of its story."""
        eater: Stage = "evaluation" if _purpose(key) == "evaluation" else "experience"
        if known & _TRAINED:
            return "imported" if _purpose(key) == "imported" else "trained", "training"
        if known & _SETTLED and _outcome(known) != _outcome_in_batch(key):
            return _outcome(known), eater
        if known & _IN_BATCH:
            return self._batched(known)
        if known & _SETTLED:  # as batched, but not in the batch that it names, nor in any
            return self._gone("batches"), "experience"
        if known & _SCORED:
            return (self._gone("settled") if known & _SCORED_DONE else "in_flight"), eater
        if known & _FINISHED:
            return (self._gone("experiences") if known & _FINISHED_DONE else "in_flight"), "score"
        return "in_flight", "generation"

    def _batched(self, known: int) -> tuple[str, Stage]:
        """In a batch that the line does not name: not yet trained, unless the line has passed it over."""
        if known & _SETTLED and not known & _IN_ITS_BATCH:
            return self._gone("batches"), "experience"
        batch, line = (known >> _BATCH_AT) - 1, self._line()
        if known & _IN_ITS_BATCH and batch in self._untrained and line.get(batch) == 0:
            return "untrained", "training"
        if not known & _IN_ITS_BATCH or not line or batch > max(line):
            return "in_flight", "training"
        return ("expired" if self._line_is_cut and batch < min(line) else "lost"), "training"

    def _gone(self, topic: str) -> str:
        """What it means that `topic` says nothing of a trajectory that it should name."""
        return "expired" if topic in self._trimmed else "lost"

    def _line(self) -> Counter[int]:
        """How often each batch is trained on the ancestor line of the newest manifest. Taken at the first call."""
        if self._times_trained is None:
            self._times_trained = Counter()
            version = max(self._manifests, default=None)
            seen: set[PolicyVersion] = set()
            while version in self._manifests and version not in seen:
                seen.add(version)
                version, batches = self._manifests[version]
                self._times_trained.update(batches)
            for batch in self._untrained & self._times_trained.keys():
                self._times_trained[batch] = 0
            self._line_is_cut = version is not None and (self._before is None or self._before.version not in seen)
        return self._times_trained

    def _add(self, trajectory: TrajectoryKey, bits: int) -> None:
        key = _packed(trajectory)
        if self._is_closed(key):
            return
        self._known[key] = self._known.get(key, 0) | bits

    def _names(self, keys: Iterable[int]) -> tuple[str, ...]:
        return tuple(map(_name, sorted(keys)))


def _outcome(known: int) -> str:
    return _OUTCOMES[known >> _OUTCOME_AT & 7]


def _dropped_without_reason(known: int) -> bool:
    return bool(known & _SETTLED and known & _NO_REASON and not known & _TRAINED) and _outcome(known) == "dropped"


def _contradicts(key: int, known: int) -> bool:
    return bool(known & _TRAINED and known & _SETTLED) and _outcome(known) != _outcome_in_batch(key)


def _outcome_in_batch(key: int) -> str:
    """What a trajectory is settled as that is in a batch."""
    return "imported" if _purpose(key) == "imported" else "batched"


def _key(name: str) -> int:
    """The key of a trajectory id. Raises ValueError."""
    return _packed(parse_trajectory_id(name))


def _packed(key: TrajectoryKey) -> int:
    """A trajectory's key as an integer that sorts by number, then member, then purpose."""
    purpose, number, member = key
    return (number << _MEMBER_BITS | member) << _PURPOSE_BITS | _PURPOSES.index(purpose)


def _purpose(key: int) -> Purpose:
    return _PURPOSES[key & (1 << _PURPOSE_BITS) - 1]


def _name(key: int) -> str:
    number, member = divmod(key >> _PURPOSE_BITS, 1 << _MEMBER_BITS)
    return trajectory_id(_purpose(key), number, member)
