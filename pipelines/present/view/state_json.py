"""A run's state as JSON, for `laminar watch --json` and `laminar runs status --json`."""

from __future__ import annotations

from typing import Any

from pipelines.inspect.run_state.errors import error_counts, errors_by_task, refused_rows
from pipelines.inspect.run_state.rates import rates
from pipelines.inspect.run_state.state import RunState
from pipelines.inspect.run_state.waiting import waiting_for, warnings_of
from pipelines.present.view.text import unmeasured_text


def measured(state: RunState) -> dict[str, Any]:
    """Return what both commands show, JSON-ready; unknown values are None."""
    errors = error_counts(state.score)
    return {
        "paused_since": state.paused_since,
        "optimizer_steps": state.step,
        "trajectories_trained": state.trajectories_trained,
        "reward": state.trainer.get("reward/mean"),
        "staleness_mean": state.trainer.get("staleness/mean"),
        "staleness_max": state.trainer.get("staleness/max"),
        "errors": errors._asdict(),
        "error_share": errors.share,
        "errors_by_task": {task: each._asdict() for task, each in errors_by_task(state.score).items()},
        "waits_for": waiting_for(state),
        "refused_rows": refused_rows(state.prompts),
        "warnings": list(warnings_of(state).values()),
        "busy": state.busy_shares,
        "lag": dict(state.open_lag),
        "batches_beyond_goal": state.batches_beyond_goal,
    }


def state_to_json(state: RunState) -> dict[str, Any]:
    """Return the state, JSON-ready; unknown values are None."""
    speed = rates(state)
    return {
        "run": state.run,
        "phase": state.phase,
        **measured(state),
        "weight_version": None if state.version is None else str(state.version),
        "weight_versions": state.versions,
        "heldout": state.greedy.last.y if state.greedy.last else None,
        "heldout_sampled": state.sampled.last.y if state.sampled.last else None,
        "heldout_unmeasured": unmeasured_text(state) or None,
        "trajectories_per_s": speed.trajectories,
        "tokens_trained_per_s": speed.tokens_trained,
        "tokens_generated_per_s": speed.tokens_generated,
        "tokens_generated": state.tokens_generated,
        "steps": {f"{role}-{shard}": dict(values) for (role, shard), values in sorted(state.steps.items())},
        "replicas": {
            str(number): {
                "state": each.state,
                "version": str(each.policy_version or ""),
                "running": each.running,
                "waiting": each.waiting,
                "kv_used": each.kv_used,
                "kv_capacity": each.kv_capacity,
                "tokens_generated": each.tokens_generated,
                "sent_at": each.sent_at,
            }
            for number, each in sorted(state.replicas.items())
        },
    }
