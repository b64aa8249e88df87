"""Evicted versions: commands of a few lines list and pull them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from record_factories import SAMPLING, version
from scripted_engine import ScriptedEngine, ScriptedWeights

from operators.rollout.evicted_versions import EvictedVersions, PulledVersion
from operators.rollout.serve_requests import ServedRequest, ServedRequests, find_version
from schemas.columns import token_ids

ROWS = [{"version": f"1.{number}", "where": [] if number == 5 else ["store"]} for number in range(6)]
PULL = """
import pathlib, sys
log, version, folder = sys.argv[1:]
open(log, "a").write(version + "\\n")
if version == "1.5":
    sys.exit("one\\nerror: version 1.5 is gone")
folder = pathlib.Path(folder)
folder.mkdir(parents=True)
(folder / ("other" if version == "1.4" else "model.safetensors")).write_text(version)
"""


def evicted(folder: Path, listing: str = f"print({json.dumps(json.dumps(ROWS))})") -> EvictedVersions:
    run = (sys.executable, "-c")
    return EvictedVersions((*run, listing), (*run, PULL, str(folder / "log")), folder / "work", {}, find_version)


def pulled(of: EvictedVersions, name: str, *awaited: str) -> PulledVersion:
    while (found := of.get(name, awaited)) is None:
        time.sleep(0.01)
    return found


def test_version_is_pulled_once_while_it_is_kept(tmp_path: Path) -> None:
    it = evicted(tmp_path)
    found = pulled(it, "v1")
    assert (found.version, found.file.read_text()) == (version(1), "1.1")
    assert pulled(it, "v1") == found
    assert (tmp_path / "log").read_text() == "1.1\n"


def test_oldest_version_that_nobody_awaits_is_removed(tmp_path: Path) -> None:
    it = evicted(tmp_path)
    first, second = pulled(it, "v1"), pulled(it, "v2")
    third = pulled(it, "v3", "v1")
    assert [each.file.exists() for each in (first, second, third)] == [True, False, True]
    assert pulled(it, "1.2").file.read_text() == "1.2", "it is pulled again"


@pytest.mark.parametrize(
    ("name", "listing", "error"),
    [
        ("v9", None, "the run has no weight version 'v9'; it can serve 1.0, 1.1, 1.2, 1.3, 1.4"),
        ("v5", None, "error: version 1.5 is gone"),
        ("v4", None, "weight version 1.4 is not in one file model.safetensors"),
        ("v1", "import sys; sys.exit('no Kafka')", "no weight version 'v1', and older ones cannot be listed: no Kafka"),
    ],
)
def test_version_that_cannot_be_pulled_is_an_error(name: str, listing: str | None, error: str, tmp_path: Path) -> None:
    it = evicted(tmp_path) if listing is None else evicted(tmp_path, listing)
    for _ in range(2):  # each request tries again
        with pytest.raises(LookupError, match=error):
            pulled(it, name)


def test_other_requests_run_while_a_version_is_pulled(tmp_path: Path) -> None:
    weights = ScriptedWeights()
    weights.add(version(7))
    engine = ScriptedEngine(steps=lambda name: 2)
    it = ServedRequests(engine, weights, evicted(tmp_path))
    tokens = token_ids([1]).to_numpy()
    for name, of in (("a", "v1"), ("b", "latest"), ("c", "v9")):
        it.submit(ServedRequest(name, of, tokens, SAMPLING))
    events = []
    while len(it):
        events += it.step()
    ended = {each["id"]: each.get("version") or each["error"] for each in events if each["finish"]}
    assert ended == {
        "b": "1.7",
        "a": "1.1",
        "c": "the run has no weight version 'v9'; it can serve 1.0, 1.1, 1.2, 1.3, 1.4",
    }
    assert engine.loads == [version(7), version(1)]
