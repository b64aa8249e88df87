"""A trajectory that a replica has: what it was given, under which versions it grows, and what placement knows of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from operators.rollout.engine import KV, Completion, PartialResponse, Request
from schemas.columns import flags, floats, token_ids
from schemas.records import (
    Assignment,
    FinishReason,
    KVManifest,
    NextOwner,
    PolicyVersion,
    Progress,
    Response,
    Trajectory,
    VersionSpan,
)


@dataclass(slots=True)
class RunningRequest:
    """`spans` are of what was made before the present weights; `told` tokens of it placement knows, since `told_at`
    (monotonic seconds) and step number `told_step`. `first_token_at` is when it got its first token here."""

    assignment: Assignment
    started_at: int
    spans: tuple[VersionSpan, ...]
    told: int
    told_at: float
    told_step: int
    first_token_at: int | None = None

    @classmethod
    def start(cls, assignment: Assignment, started_at: int, clock: float, step: int) -> RunningRequest:
        known = 0 if assignment.partial is None else len(assignment.partial.token_ids)
        return cls(assignment, started_at, assignment.version_spans, known, clock, step)

    def spans_of(self, count: int, version: PolicyVersion) -> tuple[VersionSpan, ...]:
        """What made its first `count` tokens, those beyond `spans` under `version`."""
        before = sum(span.length for span in self.spans)
        if count <= before:
            return self.spans
        if self.spans and self.spans[-1].version == version:
            *earlier, last = self.spans
            return (*earlier, VersionSpan(version, last.length + count - before))
        return (*self.spans, VersionSpan(version, count - before))

    def progress(
        self, gained: PartialResponse, version: PolicyVersion | None, next_owner: NextOwner | None, now: int
    ) -> Progress:
        """What it has `gained` since placement was told last."""
        a, count = self.assignment, len(gained.token_ids)
        spans = self.spans_of(self.told + count, version) if version is not None else self.spans
        return Progress(
            trajectory_id=a.trajectory_id,
            lease=a.lease,
            attempt=a.attempt,
            replica=a.replica,
            incarnation=a.incarnation,
            start=self.told,
            gained=response_of(gained),
            version_spans=_from(spans, self.told),
            next_owner=next_owner,
            first_token_at=self.first_token_at,
            written_at=now,
        )

    def handed_over(
        self,
        to: NextOwner,
        generated: PartialResponse,
        version: PolicyVersion | None,
        now: int,
        *,
        pinned: bool = True,
        kv: KVManifest | None = None,
    ) -> Assignment:
        """The assignment with which its next owner goes on; `pinned`, what has grown under one version does so under
        it. `kv` is where it can fetch what is computed."""
        a, count = self.assignment, len(generated.token_ids)
        spans = self.spans_of(count, version) if count and version is not None else ()
        versions = {span.version for span in spans} if pinned else set()
        return replace(
            a,
            lease=to.lease,
            replica=to.replica,
            incarnation=to.incarnation,
            policy_version=versions.pop() if len(versions) == 1 else a.policy_version,
            partial=response_of(generated) if count else None,
            version_spans=spans,
            assigned_at=now,
            kv=kv,
        )

    def finished(
        self,
        completion: Completion,
        version: PolicyVersion,
        newest: PolicyVersion | None,
        decode: Callable[[list[int]], str],
        now: int,
    ) -> Trajectory:
        """The trajectory as it has ended."""
        a, generated = self.assignment, completion.generated
        reason: FinishReason = completion.finish_reason  # type: ignore[assignment]
        return Trajectory(
            prompt=a.prompt,
            member=a.member,
            lease=a.lease,
            attempt=a.attempt,
            replica=a.replica,
            incarnation=a.incarnation,
            response=response_of(generated),
            text=decode(generated.token_ids.tolist()),
            version_spans=self.spans_of(len(generated.token_ids), version),
            newest_version=newest,
            finish_reason=reason,
            error=completion.error,
            episode=completion.episode,
            started_at=self.started_at,
            first_token_at=self.first_token_at,
            finished_at=now,
        )


def request_of(assignment: Assignment, kv: KV | None = None) -> Request:
    """What the engine is asked for, with the `kv` of what is resumed if it is here."""
    partial, prompt = assignment.partial, assignment.prompt
    asked = prompt if prompt.environment else None
    known = None
    if partial is not None and len(partial.token_ids):
        mask = None if asked is None else partial.loss_mask.to_numpy(zero_copy_only=False)
        known = PartialResponse(partial.token_ids.to_numpy(), partial.logprobs.to_numpy(), kv, mask)
    return Request(assignment.trajectory_id, prompt.token_ids.to_numpy(), prompt.sampling, known, asked)


def response_of(generated: PartialResponse) -> Response:
    """What was `generated`, as it travels."""
    return Response(token_ids(generated.token_ids), floats(generated.logprobs), flags(generated.drawn))


def _from(spans: tuple[VersionSpan, ...], start: int) -> tuple[VersionSpan, ...]:
    """What `spans` say of the tokens from `start` on."""
    found, at = [], 0
    for span in spans:
        at += span.length
        if at > start:
            found.append(VersionSpan(span.version, min(span.length, at - start)))
    return tuple(found)
