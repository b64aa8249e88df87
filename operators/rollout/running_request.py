"""A running trajectory of a replica: its assignment, its weight versions, and how much of it placement knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from operators.io.partial_pool import cut_spans, join_spans
from operators.io.repartition import Placed
from operators.rollout.agent_episodes import EndedTurn
from operators.rollout.engine import KV, NOTHING_GENERATED, Completion, PartialResponse, Request
from schemas.columns import flags, floats, token_ids, true_flags
from schemas.records import (
    Assignment,
    FinishReason,
    KVManifest,
    NextOwner,
    PolicyVersion,
    Progress,
    Response,
    TokenSampler,
    Trajectory,
    TurnEnded,
    VersionSpan,
)


@dataclass(slots=True)
class RunningRequest:
    """It runs under `version`; `spans` cover the tokens that it had before. Placement knows the first `reported`, since
    `reported_at` (monotonic seconds) and engine step `reported_step`. `first_token_at` is when this replica
    generated its first token of it (wall-clock milliseconds)."""

    assignment: Assignment
    started_at: int
    spans: tuple[VersionSpan, ...]
    reported: int
    reported_at: float
    reported_step: int
    version: PolicyVersion | None = None
    first_token_at: int | None = None

    @classmethod
    def start(
        cls, assignment: Assignment, started_at: int, clock: float, step: int, version: PolicyVersion | None = None
    ) -> RunningRequest:
        known = 0 if assignment.partial is None else len(assignment.partial.token_ids)
        return cls(assignment, started_at, assignment.version_spans, known, clock, step, version)

    def spans_of(self, count: int) -> tuple[VersionSpan, ...]:
        """The versions of its first `count` tokens; those beyond `spans` were generated under the present one."""
        before = sum(span.length for span in self.spans)
        if self.version is None or count <= before:
            return self.spans
        return join_spans((self.spans, (VersionSpan(self.version, count - before),)))

    def progress(self, gained: PartialResponse, next_owner: NextOwner | None, now: int) -> Progress:
        """The record of the tokens `gained` since the last report."""
        a, count = self.assignment, len(gained.token_ids)
        spans = self.spans_of(self.reported + count)
        return Progress(
            trajectory_id=a.trajectory_id,
            lease=a.lease,
            attempt=a.attempt,
            replica=a.replica,
            incarnation=a.incarnation,
            start=self.reported,
            gained=response_of(gained),
            version_spans=cut_spans(spans, self.reported, self.reported + count),
            next_owner=next_owner,
            first_token_at=self.first_token_at,
            written_at=now,
        )

    def turn_ended(self, ended: EndedTurn, now: int) -> TurnEnded:
        """The record of a finished turn."""
        a = self.assignment
        return TurnEnded(
            trajectory_id=a.trajectory_id,
            lease=a.lease,
            replica=a.replica,
            incarnation=a.incarnation,
            turn_id=ended.turn_id,
            start=ended.start,
            stop=ended.stop,
            finish_reason=ended.finish_reason,
            error=ended.error,
            written_at=now,
        )

    def handed_over(
        self,
        to: NextOwner,
        generated: PartialResponse,
        now: int,
        *,
        pinned: bool = True,
        kv: KVManifest | None = None,
    ) -> Placed:
        """The decision by which the next owner resumes it.

        If `pinned`, a trajectory with tokens of a single version resumes under that version. `kv` says where the next
        owner can fetch its KV.
        """
        a, count = self.assignment, len(generated.token_ids)
        spans = self.spans_of(count) if count else ()
        versions = {span.version for span in spans} if pinned else set()
        assignment = replace(
            a,
            lease=to.lease,
            replica=to.replica,
            incarnation=to.incarnation,
            policy_version=versions.pop() if len(versions) == 1 else a.policy_version,
            partial=response_of(generated) if count else None,
            assigned_at=now,
            version_spans=spans,
            kv=kv,
        )
        return Placed(assignment, "hand_over")

    def finished(
        self,
        completion: Completion,
        newest: PolicyVersion | None,
        decode: Callable[[list[int]], str],
        now: int,
        token_sampler: TokenSampler | None,
    ) -> Trajectory:
        """The record of the finished trajectory."""
        a, generated, positions = self.assignment, completion.generated, completion.positions
        prompt, spans = a.prompt, self.spans_of(len(generated.token_ids))
        if completion.prompt is not None and positions is not None:
            prompt = replace(prompt, token_ids=token_ids(completion.prompt))
            spans = _spans_at(self.spans_of(int(positions.max(initial=-1)) + 1), positions)
        reason: FinishReason = completion.finish_reason  # type: ignore[assignment]
        return Trajectory(
            prompt=prompt,
            member=a.member,
            lease=a.lease,
            attempt=a.attempt,
            replica=a.replica,
            incarnation=a.incarnation,
            response=response_of(generated),
            text=decode(_newest_conversation(completion)) if completion.text is None else completion.text,
            version_spans=spans,
            newest_version=newest,
            finish_reason=reason,
            error=completion.error,
            episode=completion.episode,
            conversations=completion.conversations,
            conversation_rewards=completion.conversation_rewards,
            started_at=self.started_at,
            first_token_at=self.first_token_at,
            finished_at=now,
            token_sampler=token_sampler,
        )


def _newest_conversation(completion: Completion) -> list[int]:
    """The response tokens of an agent's last conversation, which comes first; of other trajectories all."""
    later = completion.conversations[1:]
    tokens: list[int] = completion.generated.token_ids[: later[0].start if later else None].tolist()
    return tokens


def request_of(assignment: Assignment, kv: KV | None = None) -> Request:
    """The engine's request for `assignment`; `kv` is the KV of the partial response it resumes, where available."""
    partial, prompt = assignment.partial, assignment.prompt
    environment_prompt = prompt if prompt.environment else None
    known = None
    if partial is not None and len(partial.token_ids):
        mask = None if environment_prompt is None else partial.loss_mask.to_numpy(zero_copy_only=False)
        known = PartialResponse(partial.token_ids.to_numpy(), partial.logprobs.to_numpy(), kv, mask)
    return Request(assignment.trajectory_id, prompt.token_ids.to_numpy(), prompt.sampling, known, environment_prompt)


def known_response(assignment: Assignment) -> PartialResponse:
    """The part of the response that earlier owners of the trajectory generated; empty without one."""
    known = request_of(assignment).partial
    return NOTHING_GENERATED if known is None else known


def response_of(generated: PartialResponse) -> Response:
    """The record of what was `generated`."""
    mask = generated.loss_mask
    drawn = true_flags(len(generated.token_ids)) if mask is None else flags(mask)
    return Response(token_ids(generated.token_ids), floats(generated.logprobs), drawn)


def _spans_at(spans: tuple[VersionSpan, ...], positions: np.ndarray) -> tuple[VersionSpan, ...]:
    """The versions of the tokens at `positions`, int64[n], of a response with `spans`."""
    if not len(positions):
        return ()
    of = np.searchsorted(np.cumsum([span.length for span in spans]), positions, side="right")
    starts = np.flatnonzero(np.diff(of, prepend=-1))
    lengths = np.diff(starts, append=len(of))
    return tuple(VersionSpan(spans[of[at]].version, int(n)) for at, n in zip(starts, lengths, strict=True))


class RunningRequests(dict[str, RunningRequest]):
    """What a replica generates, by trajectory, in the order of its start; and how long there was anything.

    Requests leave it by `pop`, which measures that time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = self._ended_busy_seconds = 0.0

    @property
    def busy_seconds(self) -> float:
        """Seconds in which it was not empty."""
        return self._ended_busy_seconds + (self._clock() - self._began if self else 0.0)

    def __setitem__(self, name: str, running: RunningRequest) -> None:
        if not self:
            self._began = self._clock()
        super().__setitem__(name, running)

    def pop(self, name: str, *default: Any) -> Any:
        """Remove one and return it, as of a dict."""
        busy_seconds = self.busy_seconds
        found = super().pop(name, *default)
        if not self:
            self._ended_busy_seconds = busy_seconds
        return found
