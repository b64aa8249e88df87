"""A run of two tasks, one with a calculator environment, whose rollout is killed during episodes."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from first_day import Shell
from kills import kill
from laminar_runs import CommandServer, LaminarRun, StartRun
from small_runs import COMPACT, SMALL

from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from infra.kafka.topic_reader import read_topic
from infra.models.chat import continuation
from infra.models.checkpoint_folder import load_model, load_tokenizer, save_folder
from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig
from infra.models.weights import save_weights
from operators.prompts.config import PromptsConfig
from operators.prompts.sources import open_source
from operators.rollout.engine import Completion, Request
from operators.rollout.environments.config import EnvironmentSpec
from operators.rollout.environments.pool import EnvironmentPool
from operators.rollout.episodes import EpisodeEngine
from operators.rollout.transformers_engine import TransformersEngine
from operators.trainer.imitation import Example, LearningRates, imitate
from pipelines.inspect.metrics_file import read_metrics
from schemas.metric_labels import values_by_task
from schemas.records import Experience, MicroBatch, PolicyVersion, Progress, Trajectory
from schemas.topics import BATCHES, EXPERIENCES, PROGRESS, TRAJECTORIES, Topic

R = TypeVar("R")
STEPS = 2
CALL, RESULT = "<calc>1+1</calc>", "<result>2</result>"
SLOW = f"{Path(__file__).with_name('slow_calculator.py')}:SlowCalculator"
FIRST = PolicyVersion(1, 0)


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model trained to call the calculator twice before it answers, always identically."""
    model, tokenizer = build_demo_model(DemoModelConfig(layers=1))
    source = open_source(PromptsConfig(task="chain_sum", task_args=SMALL["prompts"]["task_args"], seed=1))
    call, result = tokenizer.encode(CALL), tokenizer.encode(RESULT)
    examples = []
    for number in range(64):
        entry = source[number]
        question, answer = tokenizer.encode(entry.text), tokenizer.encode(f"#{entry.reference['answer']}")
        examples += [Example([*question, *(call + result) * calls], call) for calls in range(2)]
        examples.append(Example([*question, *(call + result) * 2], [*answer, tokenizer.eos_token_id]))
    imitate(model, examples, steps=60, batch=16, rates=LearningRates(1e-2, 5e-3), warmup=5, seed=0)
    model.set_attn_implementation("sdpa")
    folder = tmp_path_factory.mktemp("caller") / "model"
    save_folder(model, tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentPool]:
    """The environment alone; its file exists, so it does not wait."""
    existing = tmp_path_factory.mktemp("there") / "file"
    existing.touch()
    pool = EnvironmentPool(EnvironmentSpec(SLOW, options={"file": str(existing)}, turns=4, turn_tokens=20))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def run(
    start_run: StartRun, broker: Broker, caller: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LaminarRun, dict[str, list[int]]]:
    """A run whose rollout was killed during the third turn of episodes, and those episodes' reported tokens."""
    go = tmp_path_factory.mktemp("slow") / "go"
    servers = broker.bootstrap_servers
    changes = (
        COMPACT,
        "prompts.tasks=[{name='talk', environment='SlowCalculator', heldout=0}, {name='sums', heldout=2}]",
        "prompts.max_new_tokens=96",
        f"rollout.environments=[{{name='{SLOW}', options={{file='{go}'}}, turns=4, turn_tokens=20, seconds=60.0}}]",
        "rollout.progress_tokens=2",
        "rollout.progress_s=0.2",
        "score.rewards=[{name='length', options={target=0, limit=97}}]",
        "score.tasks=[{name='talk', rewards=[{name='environment'}]}]",
        f"trainer.optimizer_steps={STEPS}",
    )
    run = start_run("episodes-of-a-run", f"kafka.bootstrap_servers={servers}", f"model.path={caller}", *changes)
    run.pid_of("rollout-0")  # the topics exist by then
    reported: dict[str, list[int]] = {}

    def third_turns() -> bool:
        masks: dict[str, list[bool]] = defaultdict(list)
        tokens: dict[str, list[int]] = defaultdict(list)
        for progress in written(broker, run, PROGRESS, Progress):
            masks[progress.trajectory_id] += progress.gained.loss_mask.to_pylist()
            tokens[progress.trajectory_id] += progress.gained.token_ids.to_pylist()
        reported.update({name: tokens[name] for name, mask in masks.items() if turns(np.array(mask)) >= 3})
        return bool(reported)

    run.until(third_turns, 150, "an episode in its third turn")
    kill(run, "rollout-0")
    go.touch()
    assert run.wait(240) == 0, run.output()
    return run, reported


def written(broker: Broker, run: LaminarRun, topic: Topic, kind: type[R]) -> Iterator[R]:
    """The records of class `kind` that `run` wrote to `topic`."""
    for record in read_topic(ClientProperties.at(broker.bootstrap_servers), topic.name(run.name)):
        yield from (row for row in record.rows if isinstance(row, kind))


def turns(mask: np.ndarray) -> int:
    """The number of turns in a response with this loss mask."""
    return int(np.diff(mask.astype(int), prepend=0).clip(0).sum())


def test_episodes_are_generated_scored_and_trained(run: tuple[LaminarRun, object], broker: Broker) -> None:
    audit = run[0].audit()
    assert audit["passed"]
    assert (audit["trained"], audit["lost"], audit["trained_twice"], audit["failed"]) == (STEPS * 16, 0, 0, 0)
    experiences = list(written(broker, run[0], EXPERIENCES, Experience))
    counts = []
    for each in experiences:
        trajectory, episode = each.trajectory, each.trajectory.episode
        if trajectory.prompt.task != "talk":
            continue
        assert episode is not None
        mask = trajectory.response.loss_mask.to_numpy(zero_copy_only=False)
        assert turns(mask) == len(episode.rewards)
        assert each.components[0].value == sum(episode.rewards)
        counts.append(len(episode.rewards))
        ((question, *said),) = [json.loads(conversation.messages) for conversation in trajectory.conversations]
        assert (question["content"], "".join(each["content"] for each in said)) == (
            trajectory.prompt.text,
            trajectory.text,
        )
        if RESULT in trajectory.text:
            observed = np.flatnonzero(~mask)
            assert len(observed) >= len(RESULT)
            assert (trajectory.response.logprobs.to_numpy()[observed] == 0).all()
    assert sum(count > 2 for count in counts) > len(counts) / 2
    by_name = {each.trajectory.trajectory_id: each.trajectory for each in experiences}
    for part in written(broker, run[0], BATCHES, MicroBatch):
        masks = np.split(part.loss_mask.to_numpy(zero_copy_only=False), np.cumsum(part.lengths.to_numpy())[:-1])
        for name, mask in zip(part.trajectory_ids, masks, strict=True):
            reported = by_name[name].response.loss_mask.to_numpy(zero_copy_only=False)
            assert mask[len(mask) - len(reported) :].tolist() == reported.tolist()
    trained = [metric for metric in read_metrics(run[0].folder / "metrics.jsonl") if metric.name == "trainer"]
    assert [metric.step for metric in trained] == list(range(1, STEPS + 1))


def test_tasks_have_separate_rewards_and_metrics(run: tuple[LaminarRun, object], broker: Broker) -> None:
    experiences = list(written(broker, run[0], EXPERIENCES, Experience))
    rewards = {(each.trajectory.prompt.task, each.components[0].name) for each in experiences}
    assert rewards == {("talk", "environment"), ("sums", "length")}
    prompts = [each.trajectory.prompt for each in experiences]
    assert {prompt.task for prompt in prompts if prompt.purpose == "evaluation"} == {"sums"}
    batches = list(written(broker, run[0], BATCHES, MicroBatch))
    trained = {name for part in batches for name in part.trajectory_ids}
    counts = Counter(e.trajectory.prompt.task for e in experiences if e.trajectory.trajectory_id in trained)
    metrics = [metric for metric in read_metrics(run[0].folder / "metrics.jsonl") if metric.name == "experience"]
    for task, count in counts.items():
        assert sum(values_by_task(metric.values, "trajectories").get(task, 0.0) for metric in metrics) == count


def test_samples_are_of_the_task_that_is_named(
    run: tuple[LaminarRun, object], command_server: CommandServer, tmp_path: Path
) -> None:
    shell = Shell(command_server, run[0].here, tmp_path)
    for task in ("talk", "sums"):
        found = shell("samples", "--task", task, "--run", run[0].name, "--json").json
        assert {group["task"] for group in found} == {task}


def test_episode_of_a_killed_replica_resumes_identically(
    run: tuple[LaminarRun, dict[str, list[int]]], broker: Broker, caller: Path, pool: EnvironmentPool
) -> None:
    """It resumes from its reported tokens, and ends with the tokens and rewards of an undisturbed episode."""
    ended = {each.trajectory_id: each for each in written(broker, run[0], TRAJECTORIES, Trajectory)}
    killed = [ended[name] for name in run[1]]
    assert killed
    assert all(each.lease > 1 and each.attempt == 1 and each.policy_version == FIRST for each in killed)
    expected = undisturbed(killed, caller, pool)
    for each in killed:
        tokens = each.response.token_ids.to_pylist()
        assert tokens[: len(run[1][each.trajectory_id])] == run[1][each.trajectory_id]
        assert tokens == expected[each.trajectory_id].generated.token_ids.tolist()
        assert each.episode == expected[each.trajectory_id].episode


def undisturbed(trajectories: list[Trajectory], model: Path, pool: EnvironmentPool) -> dict[str, Completion]:
    """The completions of the same requests in an engine that is not killed."""
    tokenizer, loaded = load_tokenizer(model), load_model(model)
    engine = TransformersEngine(loaded, slots=16)
    save_weights(loaded, model / "weights")
    engine.load(model / "weights", FIRST)

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    def encode(text: str) -> list[int]:
        return continuation(tokenizer, text, split_special_tokens=True)

    episodes = EpisodeEngine(engine, {"SlowCalculator": pool}, encode, decode)
    for each in trajectories:
        prompt = each.prompt
        tokens = prompt.token_ids.to_numpy()
        episodes.submit(Request(each.trajectory_id, tokens, prompt.sampling, None, prompt))
    done: dict[str, Completion] = {}
    while len(done) < len(trajectories):
        done |= {completion.trajectory_id: completion for completion in episodes.step()}
    episodes.close()
    return done
