"""Validation of decoded control records: values that no process of a run would write.

An invalid record becomes a dead letter before any step receives it. Steps may therefore rely on columns of equal
length, on numbers within bounds, and on versions that follow from their batches. Experiences, trajectories in blocks,
and micro-batches are validated by the steps that read them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from infra.json_text import decode_json
from schemas import records as r
from schemas.identity import is_trajectory_id
from schemas.records.relays import MAX_NEEDED_VERSIONS
from schemas.records.status import MAX_PAUSE_TEXT
from schemas.shape import fields_of

if TYPE_CHECKING:
    from schemas.block import Block  # pyarrow, which commands that show control records do without

MAX_COUNT = 2**53
"""Maximum of every count: the largest integer that JSON readers of all languages represent exactly."""
MAX_STARTS = 10**9
"""Starts of one process: one a second for thirty years."""
MAX_MEMBERS = 65_536
"""Samples of one prompt, at most."""
MAX_BATCHES_APART = 1000
"""Batches that the trainer may train between two published versions."""
MAX_STARTS_APART = 10_000
"""Consecutive starts of the trainer that may publish no version, and of a replica without a heartbeat."""
MAX_PROMPTS_AHEAD = 10_000
"""How far the number of a prompt may be ahead of all earlier ones."""
MAX_UNIX_MS = 253_402_300_799_999
"""The end of the year 9999 in Unix milliseconds: the last time that Python can format."""
_BOUNDS: Mapping[str, tuple[int, int]] = {
    "incarnation": (0, MAX_STARTS),
    "destination_incarnation": (0, MAX_STARTS),
    "epoch": (0, MAX_STARTS),
    "replica": (-1, 10**6),  # -1: no replica; placement itself finished the trajectory
    "destination": (0, 10**6),
    "relay": (0, 2**31 - 1),
    "process": (0, 10**6),
    "shard": (0, 10**6),
    "samples": (1, MAX_MEMBERS),
    "group_size": (1, MAX_MEMBERS),
    "member": (0, MAX_MEMBERS - 1),
    "level": (0, 10**6),
    "groups": (-MAX_COUNT, MAX_COUNT),  # imported groups are numbered downwards from -1
    "seed": (-(2**63), 2**63 - 1),
}
_NOT_VALIDATED = (r.DeadLetter, r.MicroBatch)
_ROW_BOUNDS = {"prompt.number": MAX_COUNT, "member": MAX_MEMBERS - 1, "prompt.samples": MAX_MEMBERS}


def invalid_reason(record: Any) -> str | None:
    """Why `record` is invalid; None if it is valid."""
    kind = type(record)
    if kind in _NOT_VALIDATED:
        return None
    rule = _RULES.get(kind)
    return next(_numbers_out_of_range(record), None) or (next(rule(record), None) if rule is not None else None)


def invalid_rows(block: Block) -> list[int]:
    """The invalid rows of `block`, if it holds assignments, trajectories or experiences."""
    if block.kind not in (r.Assignment, r.Trajectory, r.Experience):
        return []
    of = "trajectory." if block.kind is r.Experience else ""
    columns = {name: block.column(of + name).to_numpy() for name in _ROW_BOUNDS}
    invalid = columns["member"] >= columns["prompt.samples"]
    for name, most in _ROW_BOUNDS.items():
        invalid |= (columns[name] < 0) | (columns[name] > most)
    found: list[int] = invalid.nonzero()[0].tolist()
    return found


def _numbers_out_of_range(record: Any) -> Iterator[str]:
    """The integers of `record`, and of its nested records, that are out of range."""
    kind: Any = type(record)
    for name, many, nested, low, high in _number_fields(kind):
        value = getattr(record, name)
        if value is None:
            continue
        for each in value if many else (value,):
            if nested:
                yield from (f"{name}: {reason}" for reason in _numbers_out_of_range(each))
            elif not low <= each <= high:
                yield f"{name} is {each}, which is not between {low} and {high}"


@cache
def _number_fields(kind: Any) -> tuple[tuple[str, bool, bool, int, int], ...]:
    """Integer and record fields of `kind`: name, whether a tuple, whether of records, least and greatest value."""
    found = []
    for field in fields_of(kind):
        nested = hasattr(field.of, "__dataclass_fields__")
        if field.kind in ("scalar", "tuple", "record") and (nested or field.of is int):
            low, high = (0, MAX_UNIX_MS) if field.name.endswith("_at") else _BOUNDS.get(field.name, (0, MAX_COUNT))
            found.append((field.name, field.kind == "tuple", nested, low, high))
    return tuple(found)


NEWEST_MANIFEST = "newest_manifest"
"""The key of the newest accepted manifest in the state of a commit note."""


class ManifestOrder:
    """Validates manifests, in log order, against those before them.

    `state` is that of the last commit note: a restart may first read the late manifest of a paused trainer, which is
    far older than the next one.
    """

    def __init__(self, state: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._epoch, self._number = state.get(NEWEST_MANIFEST, (-1, -1))

    def invalid_reason(self, manifest: r.WeightVersion) -> str | None:
        """Why `manifest` cannot follow those accepted so far; None: it is accepted."""
        (epoch, number), parent = (manifest.version.epoch, manifest.version.number), manifest.parent
        if self._number >= 0:
            if parent is not None and parent.number > self._number:
                return (
                    f"version {manifest.version} has parent {parent}, but the newest published number is {self._number}"
                )
            if number > self._number + MAX_BATCHES_APART or epoch > self._epoch + MAX_STARTS_APART:
                return f"version {manifest.version} is too far ahead of the newest, {self._epoch}.{self._number}"
        self._epoch, self._number = max(self._epoch, epoch), max(self._number, number)
        return None

    def state(self) -> dict[str, Any]:
        """What a commit note must contain of it; empty before the first manifest."""
        return {NEWEST_MANIFEST: [self._epoch, self._number]} if self._number >= 0 else {}


def _version(manifest: r.WeightVersion) -> Iterator[str]:
    before = 0 if manifest.parent is None else manifest.parent.number
    if manifest.parent is not None and not manifest.parent < manifest.version:
        yield f"version {manifest.version} does not follow its parent {manifest.parent}"
    trained, batches = manifest.version.number - before, manifest.batches  # each batch adds one to the number
    by_hand = trained in (0, 1) and not batches  # `laminar weights publish`
    if not by_hand and (trained != len(batches) or batches != tuple(range(before, before + trained))):
        yield f"version {manifest.version} does not follow from parent {manifest.parent} and batches {_few(batches)}"
    if not set(manifest.untrained_batches) <= set(manifest.batches):
        yield f"untrained batches {_few(manifest.untrained_batches)} are not among its batches"


def _chain(chain: r.RelayChain) -> Iterator[str]:
    relays = [link.relay for link in chain.links]
    if len(set(relays)) < len(relays) or not set(chain.joining) <= set(relays):
        yield f"relays {_few(relays)} with {_few(chain.joining)} joining do not form a chain"
    if chain.schedule not in ("chain", "tree", "binomial"):
        yield f"relay schedule {chain.schedule[:40]!r} is unknown"
    if len(chain.needed) > MAX_NEEDED_VERSIONS:
        yield f"{len(chain.needed)} needed versions are more than {MAX_NEEDED_VERSIONS}"
    for link in chain.links:
        if (reason := _address_error(link.address)) is not None:
            yield f"relay {link.relay}: {reason}"


def _pause(request: r.Pause) -> Iterator[str]:
    for name, text in (("requested_by", request.requested_by), ("reason", request.reason)):
        if len(text) > MAX_PAUSE_TEXT:
            yield f"{name} has {len(text)} characters, more than {MAX_PAUSE_TEXT}"


def _replica(status: r.ReplicaStatus) -> Iterator[str]:
    if status.replica < 0:
        yield f"replica {status.replica} is negative"
    if not 0 <= status.step_seconds < MAX_COUNT:
        yield f"an engine step of {status.step_seconds} s is out of range"
    if not 0 <= status.first_incarnation <= status.incarnation:
        yield f"first_incarnation {status.first_incarnation} is not one up to {status.incarnation}"
    if status.kv_address and (reason := _address_error(status.kv_address)) is not None:
        yield reason


def _relay(status: r.RelayStatus) -> Iterator[str]:
    for text in status.versions:
        try:
            r.PolicyVersion.parse(text)
        except ValueError as error:
            yield str(error)
    if status.address and (reason := _address_error(status.address)) is not None:
        yield reason


def _stage_status(status: r.StageStatus) -> Iterator[str]:
    if status.replica < 0:
        yield f"replica {status.replica} is negative"
    if status.address and (reason := _address_error(status.address)) is not None:
        yield reason


def _arrival(arrival: r.RelayArrival) -> Iterator[str]:
    if len(arrival.chunks) % 2 or any(number < 0 for number in arrival.chunks):
        yield f"chunks {_few(arrival.chunks)} are not runs of chunks"


def _stage_group(order: r.StageGroup) -> Iterator[str]:
    bounds = [(stage.first, stage.end) for stage in order.stages]
    ends = [0, *(end for _, end in bounds)]
    if not bounds or any(first != before or end < first for (first, end), before in zip(bounds, ends, strict=False)):
        yield f"group {order.group[:40]!r}: its stages do not follow each other from layer 0"
    elif (order.stages[0].replica, order.stages[0].incarnation) != (order.replica, order.incarnation):
        yield f"group {order.group[:40]!r}: replica {order.replica} is not its first stage"
    for stage in order.stages:
        if (reason := _address_error(stage.address)) is not None:
            yield f"replica {stage.replica}: {reason}"


def _settled(settled: r.Settled) -> Iterator[str]:
    if not is_trajectory_id(settled.trajectory_id):
        yield f"not a trajectory id: {settled.trajectory_id[:80]!r}"
    elif (settled.outcome in ("batched", "imported")) != (settled.batch is not None):
        yield f"{settled.trajectory_id}: outcome {settled.outcome} does not fit batch {settled.batch}"


def _trajectory_id(
    record: r.Progress | r.AssignmentRejected | r.TrajectoryClosed | r.TurnRequest | r.TurnEnded | r.EpisodeEnd,
) -> Iterator[str]:
    if not is_trajectory_id(record.trajectory_id):
        yield f"not a trajectory id: {record.trajectory_id[:80]!r}"


def _progress(record: r.Progress) -> Iterator[str]:
    yield from _trajectory_id(record)
    yield from _response(record.trajectory_id, record.gained, record.version_spans)


def _turn_request(record: r.TurnRequest) -> Iterator[str]:
    yield from _trajectory_id(record)
    if any(not each.start < each.stop <= record.start for each in record.context):
        yield f"{record.trajectory_id}: its context is not within the {record.start} tokens before the turn"
    if not (record.context or len(record.token_ids)):
        yield f"{record.trajectory_id}: the request is empty"
    if not _are_tools(record.tools):
        yield f"{record.trajectory_id}: its tools are not a JSON list of functions with names"
    if not _are_messages(record.messages):
        yield f"{record.trajectory_id}: its messages are not a JSON list of objects"


def _are_tools(text: str) -> bool:
    """Whether `text` lists functions in the shape of OpenAI's API."""
    try:
        tools = decode_json(text)
        return isinstance(tools, list) and all(isinstance(tool["function"]["name"], str) for tool in tools)
    except (ValueError, TypeError, KeyError):
        return False


def _are_messages(text: str) -> bool:
    try:
        messages = decode_json(text)
    except ValueError:
        return False
    return isinstance(messages, list) and all(isinstance(each, dict) for each in messages)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
        return True
    except (ValueError, RecursionError):
        return False


def _turn_ended(record: r.TurnEnded) -> Iterator[str]:
    yield from _trajectory_id(record)
    if record.start > record.stop:
        yield f"{record.trajectory_id}: a turn from token {record.start} to {record.stop}"


def _episode_end(record: r.EpisodeEnd) -> Iterator[str]:
    yield from _trajectory_id(record)
    if record.rewards is not None and len(record.rewards) != len(record.segments):
        yield f"{record.trajectory_id}: {len(record.segments)} segments with {len(record.rewards)} rewards"
    for segment in record.segments:
        tokens = sum(each.stop - each.start for each in segment.ranges)
        if any(not each.start < each.stop for each in segment.ranges) or segment.prompt_tokens > tokens:
            yield f"{record.trajectory_id}: a segment of {tokens} tokens has {segment.prompt_tokens} prompt tokens"


def _assignment(record: r.Assignment) -> Iterator[str]:
    yield from _prompt(record.prompt)
    if record.partial is not None:
        yield from _response(record.trajectory_id, record.partial, record.version_spans)


def _response(name: str, response: r.Response, spans: Sequence[r.VersionSpan]) -> Iterator[str]:
    counts = {len(column) for column in (response.token_ids, response.logprobs, response.loss_mask)}
    if len(counts) > 1 or sum(span.length for span in spans) not in counts:
        yield f"{name}: tokens, logprobs, mask and version spans do not agree"
    elif (least := response.token_ids.to_numpy(zero_copy_only=False).min(initial=0)) < 0:
        yield f"{name}: token {least} is negative"


def _prompt(prompt: r.Prompt) -> Iterator[str]:
    if not len(prompt.token_ids):
        yield f"{prompt.prompt_id}: the prompt is empty"
    sampling = prompt.sampling
    if not (0 <= sampling.temperature < MAX_COUNT and 0 <= sampling.top_p <= 1):
        yield f"{prompt.prompt_id}: temperature {sampling.temperature} or top_p {sampling.top_p} is out of range"
    if prompt.environment and not _is_json(prompt.reference):
        yield f"{prompt.prompt_id}: its reference is not JSON: {prompt.reference[:80]!r}"


def _leases(order: r.Cancel | r.Release) -> Iterator[str]:
    if len(order.leases) != len(order.trajectory_ids):
        yield f"{len(order.trajectory_ids)} trajectories with {len(order.leases)} leases"


def _proposal(proposal: r.BatchProposal) -> Iterator[str]:
    if len(proposal.groups) != len(proposal.sizes):
        yield f"{len(proposal.groups)} groups with {len(proposal.sizes)} sizes"
    if any(not 1 <= size <= MAX_MEMBERS for size in proposal.sizes):
        yield f"group sizes {_few(proposal.sizes)} are not between 1 and {MAX_MEMBERS}"


def _level_success(success: r.LevelSuccess) -> Iterator[str]:
    if not len(success.tasks) == len(success.correct) == len(success.answered):
        counts = f"{len(success.correct)} correct and {len(success.answered)} answered counts"
        yield f"{len(success.tasks)} tasks with {counts}"
    elif any(not 0 <= correct <= answered for correct, answered in zip(success.correct, success.answered, strict=True)):
        yield "more correct answers than answers, or a negative count"


def _address_error(text: str) -> str | None:
    host, colon, port = text.rpartition(":")
    fits = colon and host and port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65_536
    return None if fits else f"{text[:80]!r} is not an address (host:port)"


def _few(numbers: Any) -> str:
    """The first four numbers, and how many follow."""
    found = list(numbers[:4])
    return f"{found}{f' and {len(numbers) - 4} more' if len(numbers) > 4 else ''}"


_RULES: Mapping[type, Callable[[Any], Iterator[str]]] = {
    r.WeightVersion: _version,
    r.RelayChain: _chain,
    r.Pause: _pause,
    r.ReplicaStatus: _replica,
    r.RelayStatus: _relay,
    r.StageStatus: _stage_status,
    r.RelayArrival: _arrival,
    r.StageGroup: _stage_group,
    r.Settled: _settled,
    r.Progress: _progress,
    r.AssignmentRejected: _trajectory_id,
    r.TrajectoryClosed: _trajectory_id,
    r.TurnRequest: _turn_request,
    r.TurnEnded: _turn_ended,
    r.EpisodeEnd: _episode_end,
    r.Prompt: _prompt,
    r.Assignment: _assignment,
    r.Cancel: _leases,
    r.Release: _leases,
    r.BatchProposal: _proposal,
    r.LevelSuccess: _level_success,
}
