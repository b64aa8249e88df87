"""benchmarks/beyond_paper.py: its table, and that each row changes what it says. The predictions are invented."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import beyond_paper
from benchmarks.beyond_paper import BASE, FEW, LongestTrueFirst, variants
from benchmarks.paper import Point, cluster_of
from operators.io.elements import ReceivedRecord
from operators.io.pending import PendingOffsets
from operators.placement import moves, place_trajectories
from operators.placement.repack import KVLoad, plan_repack
from schemas.columns import token_ids
from schemas.records import Prompt, Sampling


def seen(point: Point, part: int, seed: int, steps: int) -> dict[str, Any]:
    """Figures of a prediction, and which parts of the code are replaced while it is made."""
    loads = [KVLoad(0, 40, 100, None, 4, 0, 10), *(KVLoad(n, 60, 100, None, 6, 0, 10) for n in (1, 2))]
    return {
        **dict.fromkeys(("kv_use", "rollout_idle", "trainer_idle", "latency_s", "staleness_mean"), 0.5),
        "tokens_per_s": 1000.0 * (1 + point.train_share),
        "trajectories_per_cpu_s": 10.0,
        "speed": 100.0,
        "balances": moves.plan_queue_balancing.__name__ == "plan_queue_balancing",
        "parts": bool(plan_repack(loads)),
        "longest": place_trajectories.WaitingWork is LongestTrueFirst,
    }


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """What the command prints with these arguments."""
    monkeypatch.setattr(beyond_paper, "predict", seen)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["beyond_paper.py", "--results", str(tmp_path / "beyond.json"), *arguments])
        beyond_paper.main()
        return capsys.readouterr().out

    return run


def test_gains_are_those_over_all_additions(main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {line.split("│")[1].strip(): line for line in main().splitlines() if "│" in line}
    assert "+81.2 %" in lines["832 GPUs train"]
    assert "+0.0 %" in lines["no KV transfer"]  # of the row with as many GPUs, which is as fast
    monkeypatch.setattr(beyond_paper, "predict", lambda *point: {**seen(*point), "tokens_per_s": 1.0})
    assert "+81.2 %" in main("--known")


def test_each_variant_changes_one_thing() -> None:
    found = dict(variants())
    assert {variant.base for variant in found.values()} == {BASE, FEW}
    for name, variant in found.items():
        base = found[variant.base].point
        with pytest.MonkeyPatch.context() as replaced:
            replaced.setattr(beyond_paper, "predict", seen)
            row = variant.predict(8, 0, 5)
        configured = cluster_of(variant.point, 8, 0, 5) != cluster_of(base, 8, 0, 5)
        changed = [not row["balances"], not row["parts"], row["longest"], configured]
        assert sum(changed) == (name != variant.base), (name, changed)


def test_longest_group_begins_first() -> None:
    waiting = LongestTrueFirst(PendingOffsets(), lambda work: False)
    for number in range(6):
        prompt = Prompt(number, "train", "t", "", token_ids([1]), "{}", 2, Sampling(1.0, 1.0, 0, 9, (), 4))
        waiting.add(ReceivedRecord("prompts", 0, number, prompt))
    order = []
    while (work := waiting.head("train")) is not None:
        order.append((work.prompt.number, work.member))
        waiting.pop("train")
    lengths = {number: beyond_paper._tokens_of(4, number, 2) for number in range(6)}
    assert order == [(number, member) for number in sorted(lengths, key=lambda n: -lengths[n]) for member in (0, 1)]
