"""Held-out prompts: long questions are skipped; if all are skipped, the role fails at its start."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from unrun_pipelines import unrun_pipeline

from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig
from operators.prompts.draw_prompts import DrawPrompts
from pipelines import prompts as prompts_role
from pipelines.config import Config, ConfigError, parse_config
from pipelines.heldout import HeldoutPrompts

TINY = DemoModelConfig(hidden_size=32, layers=1, heads=2, kv_heads=1, mlp_size=48, max_positions=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    network, tokenizer = build_demo_model(TINY)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def config(model: Path, context: int, heldout: int = 8, gateway: Any = None, **more: Any) -> Config:
    prompts = {**more, "task": "chain_sum", "heldout": heldout, "task_args": {"min_terms": 2, "max_terms": 6}}
    kafka = {"bootstrap_servers": "nowhere:1"}
    tables = {"model": {"path": str(model)}, "prompts": prompts, "rollout": {"context": context}, "kafka": kafka}
    return parse_config({**tables, **({"gateway": gateway} if gateway else {})}, "test.toml")


def test_heldout_prompts_are_for_evaluation_and_sampled_once(model: Path) -> None:
    prompts = HeldoutPrompts(config(model, 200))()
    assert len(prompts) == 8
    assert {(prompt.purpose, prompt.samples) for prompt in prompts} == {("evaluation", 1)}
    assert len({prompt.text for prompt in prompts}) == 8


@pytest.mark.parametrize("template", ["auto", "plain"])
def test_prompts_of_agents_stop_where_turns_end(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """As the gateway's format of their messages says: held-out prompts, and those that the role draws."""
    drawn: list[DrawPrompts] = []
    monkeypatch.setattr(prompts_role, "DrawPrompts", lambda *of: drawn.append(DrawPrompts(*of)) or drawn[0])
    copied = shutil.copytree(model, tmp_path / "model")
    (copied / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<|pad|>{% endfor %}")
    settings = config(copied, 200, gateway={"template": template}, environment="agent")
    (prompt, *_) = HeldoutPrompts(settings)()
    assert prompt.sampling.stop_token_ids == ((1, 0) if template == "auto" else (1,))
    prompts_role.build(unrun_pipeline(), settings)
    assert drawn[0].plain_agents == (template == "plain")


def test_heldout_prompts_skip_and_log_long_questions(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    lengths = sorted(len(prompt.token_ids) for prompt in HeldoutPrompts(config(model, 200))())
    assert lengths[0] < lengths[-1]
    prompts = HeldoutPrompts(config(model, lengths[-1]))()
    assert 0 < len(prompts) < 8
    assert len(caplog.records) == 8 - len(prompts)
    with pytest.raises(ConfigError, match="all 8 held-out questions are too long"):
        HeldoutPrompts(config(model, 2))()


def test_heldout_prompts_interleave_tasks_in_proportion(model: Path) -> None:
    tasks = [{"name": "many", "heldout": 9}, {"name": "none", "heldout": 0}, {"name": "few", "heldout": 3}]
    prompts = HeldoutPrompts(config(model, 200, tasks=tasks))()
    assert [prompt.number for prompt in prompts] == list(range(12))
    for count in range(4, 13):
        names = [prompt.task for prompt in prompts[:count]]
        assert abs(names.count("few") - count / 4) <= 1
        assert names.count("none") == 0


def test_heldout_prompts_are_empty_without_evaluated_tasks(model: Path) -> None:
    assert HeldoutPrompts(config(model, 200, heldout=0))() == []
