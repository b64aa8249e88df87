"""A run whose model calls a calculator: episodes of several turns from prompt to optimizer step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import StartRun
from small_runs import SMALL

from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from infra.kafka.reading import read_topic
from infra.models.checkpoint_folder import save_folder
from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig
from operators.prompts.config import PromptsConfig
from operators.prompts.sources import open_source
from operators.trainer.imitation import Example, Rates, imitate
from pipelines.report.metrics_file import read_metrics
from schemas.records import Experience, MicroBatch
from schemas.topics import BATCHES, EXPERIENCES, Topic

STEPS = 2
CALL, RESULT = "<calc>1+1</calc>", "<result>2</result>"
ENVIRONMENT = (
    "prompts.environment=calculator",
    "prompts.max_new_tokens=72",
    "rollout.environments=[{name='calculator', turns=3, turn_tokens=20}]",
    "score.rewards=[{name='environment'}, {name='length', weight=0.5, options={target=0, limit=73}}]",
    f"trainer.optimizer_steps={STEPS}",
)


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned to write a call first, always the same, and mostly to end after its result."""
    model, tokenizer = build_demo_model(DemoModelConfig(layers=1))
    source = open_source(PromptsConfig(task="chain_sum", task_args=SMALL["prompts"]["task_args"], seed=1))
    examples = []
    for number in range(64):
        asked = source[number]
        question, answer = tokenizer.encode(asked.text), f"#{asked.reference['answer']}"
        examples.append(Example(question, tokenizer.encode(CALL)))
        called = [*question, *tokenizer.encode(CALL + RESULT)]
        examples.append(Example(called, [*tokenizer.encode(answer), tokenizer.eos_token_id]))
    imitate(model, examples, steps=60, batch=16, rates=Rates(1e-2, 5e-3), warmup=5, seed=0)
    model.set_attn_implementation("sdpa")
    folder = tmp_path_factory.mktemp("caller") / "model"
    save_folder(model, tokenizer, folder)
    return folder


def test_episodes_are_generated_scored_and_trained(
    start_run: StartRun, broker: Broker, run_id: str, caller: Path
) -> None:
    servers = broker.bootstrap_servers
    run = start_run(run_id, f"kafka.bootstrap_servers={servers}", f"model.path={caller}", *ENVIRONMENT)
    assert run.wait(150) == 0, run.said()
    audit = run.audit()
    assert audit["balanced"]
    assert (audit["trained"], audit["lost"], audit["trained_twice"]) == (STEPS * 16, 0, 0)

    def rows(topic: Topic, kind: type) -> list:
        records = read_topic(ClientProperties.at(servers), topic.name(run.name))
        return [row for record in records for row in record.rows if isinstance(row, kind)]

    experiences: list[Experience] = rows(EXPERIENCES, Experience)
    turns = []
    for each in experiences:
        trajectory, episode = each.trajectory, each.trajectory.episode
        assert episode is not None
        assert trajectory.prompt.environment == "calculator"
        mask = trajectory.response.loss_mask.to_numpy(zero_copy_only=False)
        assert int(np.diff(mask.astype(int), prepend=0).clip(0).sum()) == len(episode.rewards)
        assert each.components[0].value == sum(episode.rewards)
        turns.append(len(episode.rewards))
        if RESULT in trajectory.text:
            observed = np.flatnonzero(~mask)
            assert len(observed) >= len(RESULT)
            assert (trajectory.response.logprobs.to_numpy()[observed] == 0).all()
    assert sum(count > 1 for count in turns) > len(turns) / 2
    assert sum(RESULT in each.trajectory.text for each in experiences) > len(turns) / 2
    of = {each.trajectory.trajectory_id: each.trajectory for each in experiences}
    for part in rows(BATCHES, MicroBatch):
        masks = np.split(part.loss_mask.to_numpy(zero_copy_only=False), np.cumsum(part.lengths.to_numpy())[:-1])
        for name, mask in zip(part.trajectory_ids, masks, strict=True):
            told = of[name].response.loss_mask.to_numpy(zero_copy_only=False)
            assert mask[len(mask) - len(told) :].tolist() == told.tolist()
    trained = [metric for metric in read_metrics(run.folder / "metrics.jsonl") if metric.name == "trainer"]
    assert [metric.step for metric in trained] == list(range(1, STEPS + 1))
