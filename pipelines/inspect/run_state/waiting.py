"""What a run waits for, from a snapshot of its state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipelines.inspect.run_folders import run_command
from pipelines.inspect.run_state.buffers import dropped_since_batch
from pipelines.inspect.run_state.errors import error_counts, questions_drawn
from pipelines.inspect.run_state.events import GOAL_REACHED
from pipelines.inspect.run_state.learning import dropped_warning, learning_warnings
from pipelines.inspect.run_state.state import AT_END, RunState
from pipelines.roles import described
from schemas.metric_labels import EXHAUSTED, LEFT_OUT
from schemas.records import ReplicaStatus
from schemas.topics import INBOX, TRAJECTORIES

QUIET_S = (5.0, 30.0)
"""Without an optimizer step for twice its mean time, but at least and at most these times, a training run names what it
waits for."""
SILENT_MS = 60_000
"""Several times the default of `placement.heartbeat_timeout_s`, after which others get the work of a silent replica."""
_ESCAPED = str.maketrans({"{": "{{", "}": "}}"})
_OF_PHASE = {
    "broker": "Kafka",
    "warm start": "the warm start",
    "draining": "the last commits of the roles",
    "audit": "the audit of the log",
}


def waiting_for(state: RunState) -> str | None:
    """What the run waits for; None while its optimizer steps arrive."""
    phase = state.phase.replace("_", " ")
    if phase in AT_END:
        return None
    if phase in _OF_PHASE:
        return _OF_PHASE[phase]
    if phase == GOAL_REACHED:
        return "its end" if state.folder is None else f"its end: `{run_command(state.folder, 'runs drain')}`"
    if phase == "checks":
        return _check(state)
    if state.paused_since is not None:
        how = "" if state.folder is None else f": `{run_command(state.folder, 'runs unpause')}`"
        return f"the end of its pause{how}"
    if phase == "final evaluation":
        return f"answers to held-out questions under version {state.version or '-'}"
    if state.pace and state.now - state.pace[-1].at < _quiet_ms(state):
        return None
    return _before_a_step(state)


def is_over(state: RunState, silent_ms: float = SILENT_MS) -> bool:
    """Whether all questions are drawn, and no trajectory is left that may enter a batch.

    Agents between two requests and groups in the buffer cannot be seen: wait before you rely on it. Nor can what
    the buffer has not read, since it commits no offset above a group that waits: `roles` must have its status.
    A replica without a heartbeat for `silent_ms` does not count, nor what is left in its inbox: it is lost.
    """
    heard = {
        each.replica: each
        for each in state.replicas.values()
        if each.state != "stopped" and state.now - state.heard_at.get(each.replica, each.sent_at) < silent_ms
    }
    live = [each for each in heard.values() if each.state in ("running", "draining")]
    inboxes = (
        state.lag.get(INBOX.short_name, 0)
        if state.inboxes is None
        else sum(state.inboxes.get(each, 0) for each in heard)
    )
    return (
        bool(state.prompts.get(EXHAUSTED) and live)
        and state.last_metric_at["prompts"] >= state.resumed_at  # a resumed run may have more questions
        and error_counts(state.score).trajectories > 0  # else they wait for placement
        and state.paused_since is None
        and state.step >= state.experience.get("batches", 0)
        and not any(each.running or each.waiting for each in live)
        and not any(role.status in ("starting", "down") for role in state.roles.values())
        and not state.undispatched
        and not inboxes
        and not state.lag.get(TRAJECTORIES.short_name)
    )


def _quiet_ms(state: RunState) -> float:
    least, most = (1000 * seconds for seconds in QUIET_S)
    first, last = state.pace[0], state.pace[-1]
    step_ms = (last.at - first.at) / (last.step - first.step) if last.step > first.step else 0.0
    return min(max(2 * step_ms, least), most)


def _check(state: RunState) -> str:
    """The check that runs, and for how long; each calls code or reads data of the user, which may be slow."""
    if state.check is None:
        since = state.phases[-1].at if state.phases else state.started_at
        seconds = max(0, state.now - since) // 1000
        return f"the start of the checks of prompts, rewards and environments: libraries are being loaded ({seconds} s)"
    return f"the check of {state.check.subject} ({max(0, state.now - state.check.at) // 1000} s)"


def _before_a_step(state: RunState) -> str:
    """The first thing that is missing on the way from the roles to an optimizer step."""
    absent = [name for name, role in state.roles.items() if role.status in ("starting", "down")]
    if absent:
        return f"the start of {', '.join(map(described, absent[:3]))}" + (
            f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        )
    if not state.roles:
        return "the roles"
    live = [each for each in state.replicas.values() if each.state != "stopped"]
    if not live:
        return "the first heartbeat of a replica"
    if not any(each.state in ("running", "draining") for each in live):
        return "a replica that has loaded weights"
    if is_over(state):
        return f"nothing: all {questions_drawn(state.prompts)} questions are drawn (prompts.epochs)"
    work = [text.format(count) for count, text in _work(state, live) if count]
    if not work:
        return (
            "the next prompt at a replica"
            if error_counts(state.score).trajectories
            else "the first prompt at a replica"
        )
    return f"the {'next' if state.step else 'first'} optimizer step: {', '.join(work)}"


def warnings_of(state: RunState) -> dict[str, str]:
    """Signs that the run does not learn at present, by name."""
    return learning_warnings(state.signs) | dropped_warning(state.experience, state.signs.warn_steps)


def _work(state: RunState, live: Sequence[ReplicaStatus]) -> Iterator[tuple[int, str]]:
    """How much work there is on the way to an optimizer step, from the trainer back to the replicas."""
    # The trainer commits offsets only with a checkpoint, the buffer only with a batch: their lag is no such work.
    yield int(state.trainer.get("queue/lag", 0)), "{} batches wait for the trainer"
    dropped, reason = dropped_since_batch(state.experience)
    yield dropped, f"{{}} trajectories were dropped since the last batch ({reason.translate(_ESCAPED)})"
    held, left_out = int(state.experience.get("buffer/trajectories", 0)), int(state.experience.get(LEFT_OUT, 0))
    yield held, "{} trajectories are in the buffer"
    yield left_out, "{} of them in complete groups that the sampler does not take"
    yield state.lag.get(TRAJECTORIES.short_name, 0), "{} records of finished trajectories wait for score"
    yield sum(each.running for each in live), "{} trajectories are running"
