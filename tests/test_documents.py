"""The documents: links lead somewhere, named files exist, and the README's example is one that runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from documents import EACH, ROOT

from pipelines.config import parse_config
from schemas.release import RELEASE

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:schemas|infra|operators|pipelines|tests|benchmarks|examples|docs)/[\w./-]*)`")


def prose(path: Path) -> str:
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@EACH
def test_document_links_lead_to_files_and_headings(path: Path) -> None:
    for target in _LINK.findall(prose(path)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), f"{target}: no such file"
        assert not anchor or anchor in anchors(linked), f"{target}: no such heading"


@EACH
def test_document_names_existing_files(path: Path) -> None:
    missing = [name for name in _PATH.findall(prose(path)) if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize(("name", "most"), [("README.md", 9 * 1024), ("ARCHITECTURE.md", 12 * 1024)])
def test_document_is_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_bytes()) <= most


def test_architecture_names_every_folder() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    command = ["git", "ls-files", "schemas", "infra", "operators", "pipelines"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = {Path(file).parent for file in files if file.endswith(".py")}
    below = [folder for folder in folders if len(folder.parts) > 1]
    assert not [str(folder) for folder in below if f"`{folder}/`" not in text and f"`{folder.name}/`" not in text]


def test_architecture_names_existing_files_of_each_folder() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\*\*`(\w+)/`\*\*|^- `(\w+)/`: (.*)$", text, re.MULTILINE)
    layer, named, missing = "", 0, []
    for heading, folder, files in lines:
        layer = heading or layer
        for name in re.findall(r"`([a-z_]+/?)`", files):
            named += 1
            pattern = name.removesuffix("/") if name.endswith("/") else f"{name}.py"
            if not any((ROOT / layer / folder).rglob(pattern)):
                missing.append(f"{layer}/{folder}/{name}")
    assert named > 130
    assert not missing


def test_readme_example_is_a_valid_run(tmp_path: Path) -> None:
    blocks = _FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    (toml,) = [text for language, text in blocks if language == "toml"]
    (code,) = [text for language, text in blocks if language == "python"]
    config = parse_config(tomllib.loads(toml), "README.md")
    assert config.score.rewards[0].name == "my_reward.py:reward"
    (tmp_path / "my_reward.py").write_text(code)
    rewards = "[reward('6 * 8 - 19 = 29.', {'answer': answer}) for answer in ('29', 2, 48)]"
    command = ["python3", "-c", f"from my_reward import reward; print({rewards})"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "[1.0, 0.0, 0.0]\n"


def test_contributing_examples_run(tmp_path: Path) -> None:
    blocks = _FENCE.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    code = "\n\n".join(text for language, text in blocks if language == "python")
    assert all(text.count("\n") <= 30 for _, text in blocks)
    (tmp_path / "examples.py").write_text(code)
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"release": RELEASE, "run": "first", "phase": "ended"}))
    program = """
from types import SimpleNamespace
import torch
from examples import Countdown, ShortestFirst, StopsAtOnce, WithNorm, functions, phase, verify
from operators.rollout.engine import Request
from operators.trainer.advantages import Rewards
from operators.trainer.learner import Learner
from operators.trainer.learners import load_learner
assert verify("3.0", {"answer": "3"}) == 1.0
game = Countdown()
assert (game.reset({}), [game.step("") for _ in range(3)][-1]) == ("", ("0 left\\n", 1.0, True, {}))
groups = [SimpleNamespace(tokens=tokens) for tokens in (3, 1, 2)]
assert [group.tokens for group in ShortestFirst().order(groups, None)] == [1, 2, 3]
rewards = Rewards(torch.tensor([3.0, 0.0]).double(), torch.tensor([0, 0]), torch.tensor([1, 2]))
assert functions.advantage(rewards, None).tolist() == [1.0, -1.0, -1.0]
Learner.update, Learner.weights = lambda *_: {"loss": 0.5}, lambda *_: {"a": torch.tensor([3.0, 4.0])}
for kind in (WithNorm, load_learner("examples.py:WithNorm")):
    assert kind.update(object.__new__(kind), []) == {"loss": 0.5, "weights/norm": 5.0}
engine = StopsAtOnce()
engine.submit(Request("p0.0", None, SimpleNamespace(stop_token_ids=(7,))))
assert (engine.due(), engine.status().waiting) == (0.0, 1)
(done,) = engine.step()
assert (done.trajectory_id, done.generated.token_ids.tolist(), engine.status().waiting) == ("p0.0", [7], 0)
assert phase("first").data == {"run": "first", "phase": "ended"}
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, env=environment)
