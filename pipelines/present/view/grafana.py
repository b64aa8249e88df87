"""The Grafana dashboard of `laminar metrics serve`.

`python -m pipelines.present.view.grafana > infra/deploy/grafana.json` writes it.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from infra.escaping import print_escaped

WIDTH, HEIGHT = 12, 8


class Panel(NamedTuple):
    """A plot: its title, PromQL queries with legends, and Grafana unit."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"


_RUN = '{run="$run"}'
PANELS = (
    Panel("Mean reward", ((f"laminar_trainer_reward_mean{_RUN}", "mean"),)),
    Panel(
        "Held-out accuracy",
        (
            (f"laminar_heldout_accuracy{_RUN}", "{{mode}}"),
            (f"laminar_heldout_task_accuracy{_RUN}", "{{mode}} {{task}}"),
        ),
        "percentunit",
    ),
    Panel(
        "Staleness, versions",
        ((f"laminar_trainer_staleness_mean{_RUN}", "mean"), (f"laminar_trainer_staleness_max{_RUN}", "maximum")),
    ),
    Panel("Trajectories trained per second", ((f"rate(laminar_trajectories_trained_total{_RUN}[1m])", "trained"),)),
    Panel(
        "Tokens generated per second",
        ((f"rate(laminar_replica_tokens_generated_total{_RUN}[1m])", "replica {{replica}}"),),
    ),
    Panel(
        "KV cache in use",
        ((f"laminar_replica_kv_used_tokens{_RUN} / laminar_replica_kv_capacity_tokens{_RUN}", "replica {{replica}}"),),
        "percentunit",
    ),
    Panel("Lag by topic, records", ((f"laminar_lag_records{_RUN}", "{{topic}}"),)),
    Panel("Heartbeat age", ((f"laminar_replica_heartbeat_age_seconds{_RUN}", "replica {{replica}}"),), "s"),
    Panel("Waiting requests", ((f"laminar_replica_requests_waiting{_RUN}", "replica {{replica}}"),)),
    Panel("Update time per optimizer step", ((f"laminar_trainer_time_update_seconds{_RUN}", "update"),), "s"),
    Panel(
        "Weight bytes sent per second", ((f"rate(laminar_relay_sent_bytes_total{_RUN}[1m])", "relay {{relay}}"),), "Bps"
    ),
    Panel("Weight versions", ((f"laminar_weight_versions_total{_RUN}", "published"),)),
    Panel("Share of trajectories with an error", ((f"laminar_error_share{_RUN}", "errors"),), "percentunit"),
    Panel(
        "Last audit",
        (
            (f"laminar_audit_passed{_RUN}", "passed (1) or failed (0)"),
            (f"laminar_audit_findings{_RUN}", "{{finding}}"),
        ),
    ),
    Panel("Time since the last audit", ((f"time() - laminar_audit_timestamp_seconds{_RUN}", "age"),), "s"),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's import format, with the Prometheus data source and the run as variables."""
    source = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
    return {
        "__inputs": [{"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"}],
        "title": "Laminar",
        "uid": "laminar",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "run",
                    "type": "query",
                    "datasource": source,
                    "query": "label_values(laminar_optimizer_step, run)",
                    "refresh": 2,
                }
            ]
        },
        "panels": [_panel(number, panel, source) for number, panel in enumerate(PANELS)],
    }


def _panel(number: int, panel: Panel, source: dict[str, str]) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": {"x": number % 2 * WIDTH, "y": number // 2 * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": expression, "legendFormat": legend, "datasource": source}
            for at, (expression, legend) in enumerate(panel.queries)
        ],
    }


if __name__ == "__main__":
    print_escaped(json.dumps(dashboard(), indent=1))
