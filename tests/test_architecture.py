"""The sources keep the laws of the house, and the check of it sees each kind of breach."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from architecture_laws import LAYERS, MAX_LINES, MAX_TEST_NAME, violations

ROOT = Path(__file__).parents[1]


def test_the_sources_keep_the_laws() -> None:
    assert all(any((ROOT / layer).rglob("*.py")) for layer in LAYERS)
    found = violations(ROOT)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("defined", ["class Turn: ...", "Turn = tuple[int, int]", "Turn: TypeAlias = dict[str, int]"])
def test_a_name_of_two_types_is_seen(tmp_path: Path, defined: str) -> None:
    assert plant(tmp_path, "operators/a.py", "class Turn:\n    class Inner: ...\nclass _Turn: ...") == []
    (found,) = plant(tmp_path, "pipelines/inspect/a.py", f"class Inner: ...\n{defined}\nTURN = Turn")
    assert found == "pipelines/inspect/a.py:2: Turn is also in operators/a.py:1; a name has one meaning"


def test_two_tests_with_one_file_name_are_seen(tmp_path: Path) -> None:
    for path in ("tests/infra/test_a.py", "tests/infra/kafka/conftest.py", "tests/schemas/conftest.py"):
        assert plant(tmp_path, path, "") == []
    (found,) = plant(tmp_path, "tests/operators/test_a.py", "")
    assert found.startswith("tests/operators/test_a.py:1: has the file name of tests/infra/test_a.py")


def plant(root: Path, path: str, source: str) -> list[str]:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    return violations(root)


@pytest.mark.parametrize(
    ("path", "source", "reason"),
    [
        ("schemas/a.py", "from infra.kafka import admin", "imports go schemas <- infra"),
        ("infra/kafka/a.py", "import operators.io.sinks", "imports go"),
        ("operators/score/a.py", "def f():\n    from pipelines import config", "imports go"),
        ("infra/a.py", "import importlib\nimportlib.import_module('pipelines.run')", "imports go"),
        ("operators/score/a.py", "from operators.rollout.engine import Engine", "share topics"),
        ("operators/score/a.py", "from operators import rollout", "share topics"),
        ("operators/score/a.py", "from ..rollout import engine", "share topics"),
        ("pipelines/inspect/audit/a.py", "from operators.io.ledger import Ledger", "shares no code with them"),
        ("infra/a.py", "if __name__ == '__main__':\n    f()\ndef f(): ...", "runs as a program before its end"),
        ("operators/score/a.py", "import kafka", "imports kafka, which only infra/kafka/"),
        ("infra/kafka/a.py", "def f(producer):\n    producer._sender.wakeup()", "client_patches.py"),
        ("pipelines/cli/a.py", "from kafka.errors import KafkaError", "imports kafka"),
        ("operators/rollout/engine.py", "import vllm", "imports vllm"),
        ("pipelines/inspect/a.py", "from pipelines.present.view import text", "imports within pipelines go"),
        ("pipelines/run/a.py", "def f():\n    from pipelines.cli import run", "imports within pipelines go"),
        ("pipelines/a.py", "from pipelines.run.paths import files_read", "imports within pipelines go"),
        ("pipelines/a.py", "import pipelines.run", "imports within pipelines go"),
        ("pipelines/a.py", "from pipelines import cli", "imports within pipelines go"),
        ("pipelines/run/a.py", "from .. import cli", "imports within pipelines go"),
        ("pipelines/present/view/a.py", "from pipelines.present.report import html", "the report is made of views"),
        ("operators/score/a.py", "if True:\n    import torch.nn as nn", "imports torch"),
        ("infra/runners/a.py", "from transformers import AutoModel", "imports transformers"),
        ("pipelines/a.py", "from tokenizers import Tokenizer", "imports tokenizers"),
        ("operators/placement/a.py", "from safetensors.torch import load", "imports safetensors"),
        ("infra/kafka/a.py", "import apache_beam as beam", "imports apache_beam"),
        ("schemas/a.py", "import numpy as np", "orjson and pyarrow only"),
        ("operators/score/a.py", "import apache_beam as beam\n\ndef f(x): return x", "without defining a transform"),
        ("pipelines/a.py", "import apache_beam as beam\nclass A(beam.DoFn): ...", "transforms belong to an operator"),
        ("pipelines/a.py", "TOPIC = 'laminar.run.prompts'", "schemas/topics.py"),
        ("infra/a.py", "def f(run): return f'laminar.{run}.prompts'", "schemas/topics.py"),
        ("infra/a.py", "import pickle", "never code"),
        ("pipelines/cli/a.py", "print(f'{answer}')", "text that is not escaped"),
        ("pipelines/run/a.py", "import typer\ntyper.echo(answer, err=True)", "text that is not escaped"),
        ("pipelines/present/a.py", "import sys\nsys.stderr.write(answer)", "text that is not escaped"),
        ("benchmarks/a.py", "from cloudpickle import dumps", "never code"),
        ("benchmarks/a.py", "import torch\ntorch.load('x')", "calls torch.load"),
        ("operators/trainer/a.py", "from torch import save", "imports torch.save"),
        ("infra/a.py", "eval('1')", r"calls eval\(\)"),
        ("tests/a.py", "exec('1')", r"calls exec\(\)"),
        ("infra/a.py", "numpy.load('x', allow_pickle=True)", "passes allow_pickle"),
        ("infra/models/a.py", "load('x', trust_remote_code=flag)", "passes trust_remote_code"),
        ("tests/a.py", "try:\n    f()\nexcept:\n    pass", "bare except"),
        ("tests/a.py", f"class A:\n    def test_{'a' * (MAX_TEST_NAME - 4)}(self): ...", "has 61 characters"),
        ("operators/placement/a.py", "made = records.Assignment(1)", "builds an Assignment"),
        ("operators/placement/a.py", "old = now - status.sent_at > 5000", "another machine's clock"),
        ("pipelines/a.py", "x = 1\n" * (MAX_LINES + 1), f"{MAX_LINES + 1} lines"),
    ],
)
def test_a_breach_is_seen(tmp_path: Path, path: str, source: str, reason: str) -> None:
    found = plant(tmp_path, path, source)
    assert len(found) == 1, found
    assert re.search(reason, found[0])
    assert re.match(rf"{re.escape(path)}:\d+: ", found[0])


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("operators/score/a.py", "from operators.io import sinks\nfrom operators.score import rewards"),
        ("operators/score/a.py", "from schemas import records\nfrom infra.kafka import admin"),
        ("operators/score/a.py", "import apache_beam as beam\nclass ScoreFn(beam.DoFn): ..."),
        ("operators/score/a.py", "from apache_beam import PTransform\nclass Score(PTransform[int, int]): ..."),
        (
            "operators/score/a.py",
            "from apache_beam.coders import Coder\nclass C(Coder): ...",
        ),
        (
            "pipelines/inspect/audit/a.py",
            "from schemas import records\nfrom pipelines.inspect.audit import fold",
        ),
        ("pipelines/present/a.py", "from pipelines.inspect import run_folders\nfrom pipelines.config import Config"),
        ("operators/trainer/a.py", "import torch\nmodel = torch.nn.Linear(1, 1)\nmodel.eval()"),
        ("operators/rollout/vllm_engine.py", "import vllm"),
        ("operators/placement/a.py", "old = now - replica.seen_at > 5\nage = now - status.sent_at"),
        ("infra/kafka/a.py", "import kafka"),
        ("infra/a.py", "'''laminar.run.prompts is a topic.'''\nLOGGER = 'laminar'\nMETRIC = 'laminar_staleness'"),
        ("schemas/topics.py", "NAME = 'laminar.run.prompts'"),
        ("infra/a.py", "numpy.load('x', allow_pickle=False)\ntry:\n    f()\nexcept ValueError:\n    pass"),
        ("tests/a.py", "import kafka\nimport pickle\nimport torch\nfrom operators.rollout import engine"),
        ("infra/a.py", "x = 1\n" * MAX_LINES),
        ("tests/a.py", f"def test_{'a' * (MAX_TEST_NAME - 5)}(): ..."),
    ],
)
def test_what_is_allowed_is_no_breach(tmp_path: Path, path: str, source: str) -> None:
    assert plant(tmp_path, path, source) == []
