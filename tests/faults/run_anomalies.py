"""Finds anomalies of a run, from its topics in the broker's log files and the committed offsets of its groups.

One rule for every role: each record before the role's committed offset has exactly one outcome in the log, and there is
no other outcome. The names of anomalies are those of Jepsen's tests of Kafka.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from faults.log_files import read_topic
from faults.wire import rows_of
from kafka import KafkaConsumer, TopicPartition

Committed = Callable[[str, str, int], int]
"""The offset that a role ("score.0") has committed of a partition of a topic ("trajectories")."""
SETTLES_S = 75.0
"""How long a transaction may take to end: a role that is stopped in one leaves it to Kafka, which aborts it after the
transaction time-out of 60 s, at its next check."""
RESUMES_FROM_CHECKPOINT = "trainer"
"""Its checkpoint may be older than its last note, so its offsets may decrease."""
AFTER = 320
"""A trajectory is lost if none ended it, and so many under later leases have ended: ten times as many as two replicas
of 16 slots generate at a time."""
LETTERS = {"train": "p", "evaluation": "e", "imported": "i"}


def committed_offsets(bootstrap: str, run: str, inputs: dict[str, list[tuple[str, int]]]) -> Committed:
    """The offsets that the groups of `run` have committed, for the inputs of each role."""
    found: dict[tuple[str, str, int], int] = {}
    for role, places in inputs.items():
        reader = KafkaConsumer(
            bootstrap_servers=bootstrap, group_id=f"laminar.{run}.{role}", isolation_level="read_committed"
        )
        for short_name, partition in places:
            found[role, short_name, partition] = (
                reader.committed(TopicPartition(f"laminar.{run}.{short_name}", partition)) or 0
            )
        reader.close(autocommit=False)
    return lambda role, short_name, partition: found[role, short_name, partition]


def settled_anomalies(find: Callable[[], list[str]]) -> list[str]:
    """The anomalies that `find` still returns after `SETTLES_S`."""
    deadline = time.monotonic() + SETTLES_S
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


class RunLog:
    """The committed rows of a run's topics."""

    def __init__(self, log_dir: Path, run: str) -> None:
        self._log_dir, self._run = log_dir, run

    def rows(self, short_name: str, kind: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Partition, offset and fields of every committed row of a class."""
        for record in read_topic(self._log_dir, f"laminar.{self._run}.{short_name}"):
            if record.outcome == "committed" and record.value is not None:
                name, rows = rows_of(record.value, dict(record.headers))
                for row in rows if name == kind else ():
                    yield record.partition, record.offset, row

    def count(self, short_name: str, kind: str) -> int:
        """The number of such rows."""
        return sum(1 for _ in self.rows(short_name, kind))

    def committed(self) -> set[tuple[str, int]]:
        """Every committed record of the run: "topic:partition" and offset."""
        topics = {path.name.rpartition("-")[0] for path in self._log_dir.glob(f"laminar.{self._run}.*-*")}
        return {
            (f"{topic}:{record.partition}", record.offset)
            for topic in topics
            for record in read_topic(self._log_dir, topic)
            if record.outcome == "committed"
        }


def run_anomalies(log: RunLog, committed: Committed, shards: int, after: int | None = None) -> list[str]:
    """Every anomaly, one line each: name, role and subject. `shards`: the number of experience shards. `after` is as
    AFTER; None where a rollout may be paused for longer.
    """
    found = [_prompts(log), _placement(log, committed), _score(log, committed), _evaluation(log, committed)]
    found += [_experience(log, committed, shards), _trainer(log, committed, shards)]
    found += [_rollout(log, after), _autoscaler(log), _gateway(log), _notes(log)]
    return [line for lines in found for line in lines]


def _prompts(log: RunLog) -> Iterator[str]:
    numbers = Counter(row["number"] for _, _, row in log.rows("prompts", "Prompt"))
    yield from _once("prompts", range(max(numbers, default=-1) + 1), numbers)


def _placement(log: RunLog, committed: Committed) -> Iterator[str]:
    given = [row for _, _, row in log.rows("inbox", "Assignment")]
    drawn = [
        (f"{LETTERS[row['purpose']]}{row['number']}.{member}", offset < committed("placement.0", short_name, partition))
        for short_name in ("prompts", "eval-prompts")
        for partition, offset, row in log.rows(short_name, "Prompt")
        for member in range(row["samples"])
    ]
    dispatched = Counter(dict.fromkeys((_id(row, "prompt.") for row in given), 1))
    yield from _once_each("placement", drawn, dispatched)
    leases = Counter(row["lease"] for row in given)
    yield from (f"duplicate: placement gave lease {lease} {n} times" for lease, n in leases.items() if n > 1)


def _rollout(log: RunLog, after: int | None) -> Iterator[str]:
    """A lease ends once, only given ones end, and each trajectory's last one does, unless it is still under way."""
    last = {}
    given = set()
    for _, _, row in log.rows("inbox", "Assignment"):
        name = _id(row, "prompt.")
        given.add((name, row["lease"]))
        last[name] = max(row["lease"], last.get(name, 0))
    rows = [row for _, _, row in log.rows("trajectories", "Trajectory")]
    ended = Counter((_id(row, "prompt."), row["lease"]) for row in rows)
    yield from (
        f"duplicate: rollout ended lease {lease} of {name} {n} times" for (name, lease), n in ended.items() if n > 1
    )
    by_rollout = [(_id(row, "prompt."), row["lease"]) for row in rows if row["finish_reason"] != "failed"]
    yield from (f"aborted read (G1a): rollout: {name}, lease {lease}" for name, lease in set(by_rollout) - given)
    over = {name for name, _ in ended}
    over |= {row["trajectory_id"] for _, _, row in log.rows("settled", "Settled")}
    over |= {name for _, _, row in log.rows("inbox", "Cancel") for name in row["trajectory_ids"]}
    for name in last.keys() - over if after is not None else ():
        if sum(lease > last[name] for _, lease in by_rollout) >= after:
            yield f"lost write: rollout: {name}"


def _score(log: RunLog, committed: Committed) -> Iterator[str]:
    scored = Counter(
        _id(row, "trajectory.prompt.", "trajectory.") for _, _, row in log.rows("experiences", "Experience")
    )
    finished = [
        (_id(row, "prompt."), offset < committed("score.0", "trajectories", partition))
        for partition, offset, row in log.rows("trajectories", "Trajectory")
    ]
    yield from _once_each("score", finished, scored)


def _experience(log: RunLog, committed: Committed, shards: int) -> Iterator[str]:
    settled = Counter(row["trajectory_id"] for _, _, row in log.rows("settled", "Settled"))
    scored = [
        (
            _id(row, "trajectory.prompt.", "trajectory."),
            row["trajectory.prompt.purpose"] != "evaluation"
            and offset < committed(f"experience.{partition % shards}", "experiences", partition),
        )
        for partition, offset, row in log.rows("experiences", "Experience")
    ]
    yield from _once_each("experience", scored, settled)
    parts: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    members: Counter[str] = Counter()
    for partition, _, row in log.rows("batches", "MicroBatch"):
        members.update(row["trajectory_ids"])
        parts[partition, row["batch"]][row["index"]] = row["count"]
    batched = [row for _, _, row in log.rows("settled", "Settled") if row["outcome"] == "batched"]
    yield from _once("experience (batches)", [row["trajectory_id"] for row in batched], members)
    for partition in range(shards):
        numbers = sorted(batch for where, batch in parts if where == partition)
        yield from _once(f"experience.{partition} (batch numbers)", range(len(numbers)), Counter(numbers))
    for (partition, batch), indices in parts.items():
        if set(indices) != set(range(max(indices.values()))):
            yield f"torn transaction: experience wrote parts {sorted(indices)} of batch {batch} to {partition}"


def _trainer(log: RunLog, committed: Committed, shards: int) -> Iterator[str]:
    versions = {_version(row["version"]): row for _, _, row in log.rows("relay", "WeightVersion")}
    trained: Counter[int] = Counter()
    version = max(versions, default=None)
    while version in versions:  # versions without descendants were replaced after a restart
        trained.update(versions[version]["batches"])
        parent = versions[version]["parent"]
        version = _version(parent) if parent else None
    written = [
        (row["batch"], offset < committed("trainer.0", "batches", partition))
        for partition, offset, row in log.rows("batches", "MicroBatch")
    ]
    read = {batch for batch, is_read in written if is_read}
    yield from _once_each("trainer", written, trained)
    # Metrics of a repeated step are written again, so they may occur twice, but none may be missing.
    steps = {row["step"]: 1 for _, _, row in log.rows("metrics", "Metric") if row["name"] == "trainer"}
    yield from _once("trainer (metrics)", [batch + 1 for batch in sorted(read)], Counter(steps))


def _version(field: Any) -> tuple[int, int]:
    epoch, number = field.split(".") if isinstance(field, str) else (field["epoch"], field["number"])
    return int(epoch), int(number)


def _evaluation(log: RunLog, committed: Committed) -> Iterator[str]:
    settled = Counter(row["trajectory_id"] for _, _, row in log.rows("settled", "Settled"))
    answered = [
        _id(row, "trajectory.prompt.", "trajectory.")
        for partition, offset, row in log.rows("experiences", "Experience")
        if row["trajectory.prompt.purpose"] == "evaluation"
        and offset < committed("evaluation.0", "experiences", partition)
    ]
    yield from _once("evaluation", answered, settled)
    prompts = Counter(row["number"] for _, _, row in log.rows("eval-prompts", "Prompt"))
    yield from _once("evaluation (questions)", range(max(prompts, default=-1) + 1), prompts)


def _autoscaler(log: RunLog) -> Iterator[str]:
    decisions = [row for _, _, row in log.rows("scaling", "ScalingDecision")]
    yield from _once("autoscaler", range(1, len(decisions) + 1), Counter(row["number"] for row in decisions))
    for before, after in pairwise(decisions):
        if after["before"] != before["target"]:
            yield f"lost write: autoscaler: decision {after['number']} does not follow {before['number']}"
    reached = Counter(row["number"] for _, _, row in log.rows("scaling", "ScalingOutcome") if not row["error"])
    yield from (f"duplicate: autoscaler: the outcome of {number}" for number, n in reached.items() if n > 1)


def _gateway(log: RunLog) -> Iterator[str]:
    counts = [row["values"]["episodes"] for _, _, row in log.rows("metrics", "Metric") if row["name"] == "agents"]
    finished = len({_id(row, "prompt.") for _, _, row in log.rows("trajectories", "Trajectory")})
    if counts != sorted(counts) or (counts and counts[-1] > finished):
        yield f"duplicate: gateway counted {counts} episodes, {finished} have finished"


def _notes(log: RunLog) -> Iterator[str]:
    """All that a role writes may be its notes: no start and no commit is repeated or missing, no offset decreases."""
    written = log.committed()
    notes: dict[str, list[Any]] = defaultdict(list)
    for _, _, row in log.rows("restore", "CommitNote"):
        start, _, _, offsets, commit, outputs, *_ = json.loads(row["note"])
        notes[".".join(row["group"].split(".")[-2:])].append((start, commit, offsets))
        for place, offset in outputs.items():
            if (place, offset) not in written:
                yield f"torn transaction: {row['group']}: {place} has no committed record at {offset}"
    for role, of_role in notes.items():
        for (start, commit, offsets), (next_start, next_commit, next_offsets) in pairwise(of_role):
            if not (next_start == start and next_commit > commit) and (next_start, next_commit) != (start + 1, 1):
                yield f"lost write: {role}: start {next_start}, commit {next_commit} follows {start}, {commit}"
            back = [place for place, offset in offsets.items() if next_offsets.get(place, offset) < offset]
            if back and not role.startswith(RESUMES_FROM_CHECKPOINT):
                yield f"duplicate: {role}: the offsets of {back} decrease after start {start}, commit {commit}"


def _once_each(role: str, inputs: list[tuple[Any, bool]], found: Counter[Any]) -> Iterator[str]:
    """Check that each input, with whether it is before the committed offset, is found exactly once if so, and that
    nothing else is found: a reader of aborted records would write more."""
    yield from _once(role, [each for each, is_read in inputs if is_read], found)
    yield from (f"aborted read (G1a): {role}: {each}" for each in found.keys() - {each for each, _ in inputs})


def _once(role: str, wanted: Any, found: Counter[Any]) -> Iterator[str]:
    """Check that each of `wanted` is found exactly once."""
    for each in dict.fromkeys(wanted):
        if found[each] != 1:
            yield f"{'lost write' if found[each] == 0 else 'duplicate'}: {role}: {each}"


def _id(row: dict[str, Any], prompt: str, prefix: str = "") -> str:
    """The trajectory id of a row."""
    return f"{LETTERS[row[prompt + 'purpose']]}{row[prompt + 'number']}.{row[prefix + 'member']}"
