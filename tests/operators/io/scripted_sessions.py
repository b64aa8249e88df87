"""Kafka sessions that follow a script, for tests of the source and the sink."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from infra.kafka.properties import ClientProperties
from infra.kafka.session import Note, Outgoing, Partition, SessionLost
from operators.io.config import ShardConfig, TopicInput
from operators.io.source import LARGE_BYTES
from schemas.codec import encode
from schemas.records import Metric
from schemas.topics import METRICS, REPLICAS

CONFIG = ShardConfig(
    ClientProperties.at("localhost:9092"),
    "run",
    "probe",
    inputs=(TopicInput(METRICS),),
    ledger=((REPLICAS, (0,)),),
    commit_s=0.0,
)
INPUT = Partition(METRICS.name("run"), 0)
OUTPUT = f"{REPLICAS.name('run')}:0"


def metric(step: int) -> Metric:
    return Metric("a", step, {"x": 0.5}, 1_700_000_000_000)


def raw(offset: int, record: object | None = None, **changes: Any) -> SimpleNamespace:
    """A record as the consumer returns it."""
    value, headers = encode(record if record is not None else metric(offset))
    fields = {"topic": INPUT.topic, "partition": 0, "offset": offset, "key": b"a", "value": value, "headers": headers}
    fields["timestamp"] = 0
    return SimpleNamespace(**(fields | changes))


@dataclass
class ScriptedSession:
    """`polls` are returned one by one, or raised if exceptions; later polls are empty."""

    start: int
    polls: list[list[Any] | SessionLost] = field(default_factory=list)
    note: Note = field(default_factory=Note)
    ledger: list[Any] = field(default_factory=list)
    end: int = 0
    failure: BaseException | None = None
    deleted: SessionLost | None = None
    verified: list[int] = field(default_factory=list)
    lost: SessionLost | None = None
    commits: int = 1
    noted: int = 1
    position: int = 0
    behind: bool = False
    """Whether a last commit is due for the group's offsets."""
    committed: list[tuple[list[Outgoing], dict[Partition, int], Mapping[str, int], Mapping[str, Any]]] = field(
        default_factory=list
    )

    @property
    def progress(self) -> SimpleNamespace:
        return SimpleNamespace(made=self.commits > 1, failed_bytes=LARGE_BYTES)

    @property
    def ends(self) -> dict[Partition, int]:
        return {INPUT: self.end}

    @property
    def ledger_ends(self) -> dict[str, int]:
        return {OUTPUT: 10}

    def poll(self, timeout_s: float) -> list[Any]:
        polled = self.polls.pop(0) if self.polls else []
        if isinstance(polled, SessionLost):
            self.lost = polled
            raise polled
        if polled:
            self.position = polled[-1].offset + 1
        return polled

    def check_owner(self) -> None:
        """No successor."""

    def check_inputs(self) -> None:
        if self.deleted is not None:
            self.lost = self.deleted
            raise self.deleted

    def positions(self) -> dict[Partition, int]:
        return {INPUT: self.position}

    def seek(self, offsets: Mapping[Partition, int]) -> None:
        self.position = offsets[INPUT]

    def commit(
        self,
        outputs: Iterable[Outgoing],
        offsets: dict[Partition, int],
        ledger: Mapping[str, int],
        state: Mapping[str, Any],
        last: bool = False,
        note_due: bool = True,
    ) -> dict[str, int]:
        self.behind = False
        if self.failure is not None:
            raise self.failure
        outputs = list(outputs)
        self.commits += 1
        self.noted = self.commits if note_due else self.noted
        self.committed.append((outputs, offsets, ledger, state))
        return {OUTPUT: 10 * self.commits} if outputs else {}

    def group_offsets_due(self, last: bool = False) -> bool:
        return last and self.behind

    def high_watermarks(self) -> dict[Partition, int | None]:
        return {INPUT: self.end}

    def verify(self) -> None:
        self.verified.append(self.commits)


class ScriptedSessions:
    """Replaces the sessions of the process: each `open` returns the next of `script`, or raises it."""

    def __init__(self, *script: ScriptedSession | SessionLost) -> None:
        self.script = list(script)
        self.current: ScriptedSession | None = None

    def open(self, config: object) -> ScriptedSession:
        self.current = None
        opened = self.script.pop(0)
        if isinstance(opened, SessionLost):
            raise opened
        self.current = opened
        return opened

    def get(self, group: str) -> ScriptedSession | None:
        return self.current

    def close(self, group: str) -> None:
        self.current = None
