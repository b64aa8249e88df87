"""Configurations: examples load, errors name the key and suggest another, saved files load equal."""

from __future__ import annotations

import dataclasses
import math
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from pipelines.config import Config, ConfigError, KafkaConfig, load_config, parse_config, save_config
from pipelines.run.paths import files_read, with_absolute_paths

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


def error_of(table: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(table, "my.toml")
    lines = getattr(caught.value, "detail_lines", ())
    assert not lines or str(caught.value) == f"my.toml is not valid: {len(lines)} problems"
    return "\n".join(lines) or str(caught.value)


def test_save_config_leaves_the_old_file_if_it_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tmp_path / "config.toml"
    save_config(load_config(EXAMPLES[0]), saved)
    before = saved.read_text()
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_config(load_config(EXAMPLES[1]), saved)
    assert saved.read_text() == before


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_save_config_round_trips_every_example(file: Path, tmp_path: Path) -> None:
    config = load_config(file)
    saved = tmp_path / "config.toml"
    save_config(config, saved)
    assert load_config(saved) == config


def test_examples_exist() -> None:
    assert len(EXAMPLES) >= 3


def test_my_kafka_example_has_authentication_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES[0].parents[1])
    monkeypatch.setenv("KAFKA_PASSWORD", "hush")
    arguments = load_config(Path("examples/my_kafka.toml")).kafka.client().admin()
    assert len(arguments["bootstrap_servers"]) == 2
    assert (arguments["security_protocol"], arguments["sasl_plain_password"]) == ("SASL_SSL", "hush")


def test_load_config_accepts_an_empty_file(tmp_path: Path) -> None:
    file = tmp_path / "empty.toml"
    file.write_text("")
    assert load_config(file) == Config()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"trainr": {}}, "my.toml: unknown key trainr; did you mean 'trainer'?"),
        ({"trainer": {"optimiser_steps": 3}}, "unknown key trainer.optimiser_steps; did you mean 'optimizer_steps'?"),
        ({"trainer": {"learner": {"wxyz": 1}}}, "unknown key trainer.learner.wxyz; it must be one of ['algorithm',"),
        ({"trainer": {"learner": {"algorithm": {"nam": "x"}}}}, "trainer.learner.algorithm.nam; did you mean 'name'?"),
        ({"score": {"rewards": [{"name": "exact", "weigth": 2}]}}, "score.rewards.weigth; did you mean 'weight'?"),
        (
            {"rollout": {"environments": [{"name": "guess", "turn": 2}]}},
            "rollout.environments.turn; did you mean 'turns'?",
        ),
        ({"rollout": {"environments": [{"name": "gues"}]}}, "there is no environment 'gues'; did you mean 'guess'?"),
        ({"rollout": {"environments": [{"name": "guess"}] * 2}}, "are not unique"),
        (
            {"rollout": {"engine": "emulated", "environments": [{"name": "guess"}]}},
            "environments require an engine that generates text, not 'emulated'",
        ),
        (
            {"trainer": {"learner": {"algorithm": {"name": "poo"}}}},
            "'icepop' or 'ppo' (it is 'poo'); did you mean 'ppo'?",
        ),
        ({"warm_start": {"step": 5}}, "unknown key warm_start.step; did you mean 'steps'?"),
    ],
)
def test_parse_config_suggests_the_nearest_key(table: dict[str, Any], message: str) -> None:
    assert message in error_of(table)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"trainer": {"optimizer_steps": "12"}},
            "optimizer_steps: Input should be a valid integer (it is '12')",
        ),
        (
            {"trainer": {"optimizer_steps": True}},
            "optimizer_steps: Input should be a valid integer (it is True)",
        ),
        ({"trainer": {"optimizer_steps": 2.5}}, "trainer.optimizer_steps: Input should be a valid integer (it is 2.5)"),
        ({"evaluation": {"sampled": "yes"}}, "evaluation.sampled: Input should be a valid boolean (it is 'yes')"),
        ({"run": {"name": 5}}, "run.name: Input should be a valid string (it is 5)"),
        ({"rollout": {"dtype": "int8"}}, "rollout.dtype: Input should be 'float32', 'bfloat16' or 'float16'"),
        ({"score": {"rewards": {"name": "exact"}}}, "score.rewards: Input should be a valid array"),
        ({"trainer": {"learner": {"betas": [0.9]}}}, "trainer.learner.betas.1"),
        (
            {"prompts": {"environment": "calculator"}, "rollout": {"environments": ["calculator"]}},
            "rollout.environments.0: Input should be an object (it is 'calculator')",
        ),
        (
            {"prompts": {"environment": "guess"}, "rollout": {"environments": {"name": "guess"}}},
            "rollout.environments: Input should be a valid array",
        ),
        ({"prompts": 5}, "my.toml: prompts: Input should be an object (it is 5)"),
        ({"run": 5}, "my.toml: run: Input should be an object (it is 5)"),
    ],
)
def test_parse_config_rejects_values_of_wrong_types(table: dict[str, Any], message: str) -> None:
    assert message in error_of(table)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"placement": {"max_attempts": 0}}, "placement: max_attempts must be at least 1, not 0"),
        ({"placement": {"heartbeat_timeout_s": 0.0}}, "placement: heartbeat_timeout_s must be positive"),
        ({"rollout": {"heartbeat_s": 0.0}}, "rollout: heartbeat_s must be positive"),
        ({"rollout": {"step_timeout_s": 0.0}}, "rollout: step_timeout_s must be positive"),
        (
            {"rollout": {"heartbeat_s": 3.4}},
            "rollout.heartbeat_s = 3.4 needs placement.heartbeat_timeout_s of at least 10.2, three times it, not 10",
        ),
        (
            {"relay": {"heartbeat_s": 1.0}, "placement": {"heartbeat_timeout_s": 2.0}, "rollout": {"heartbeat_s": 0.5}},
            "relay.heartbeat_s = 1 needs placement.heartbeat_timeout_s of at least 3, three times it, not 2",
        ),
        ({"placement": {"replica_batch": 0}}, "placement: replica_batch must be at least 1"),
        ({"experience": {"global_batch": 0}}, "experience: global_batch must be at least 1"),
        ({"rollout": {"slots": 0}}, "rollout: slots must be at least 1"),
        ({"autoscaling": {"maximum": 9}}, "autoscaling.maximum is 9 processes of 1 replicas, but there are 8 inboxes"),
        ({"autoscaling": {"minimum": 9}}, "autoscaling.minimum is 9 processes of 1 replicas, but there are 8 inboxes"),
        ({"autoscaling": {"policy": "cost"}}, "policy 'cost' is neither built in nor module:Class"),
        ({"evaluation": {"every": -1}}, "evaluation: every must be at least 0"),
        ({"kafka": {"partitions": 0}}, "kafka: partitions must be at least 1"),
        ({"kafka": {"replication_factor": 0}}, "kafka: replication_factor must be at least 1, or -1"),
        ({"kafka": {"outage_timeout_s": 0.0}}, "kafka: outage_timeout_s must be positive"),
        ({"kafka": {"transaction_timeout_s": 0.9}}, "kafka: transaction_timeout_s must be at least 1, not 0.9"),
        ({"kafka": {"transaction_timeout_s": 3601}}, "kafka: transaction_timeout_s must be at most 3600, not 3601"),
        ({"kafka": {"metrics_hours": math.nan}}, "kafka: metrics_hours must be at least 1, not nan"),
        ({"run": {"time_scale": math.inf}}, "run: time_scale must be finite, not inf"),
        ({"run": {"name": "a run"}}, "run: run name 'a run' must be"),
        ({"trainer": {"lost_batches": [3, -1]}}, "trainer: lost_batches must be at least 0, not -1"),
        ({"trainer": {"checkpoint_folder": "s4://bucket/x"}}, "trainer: checkpoint_folder: the scheme of 's4'://..."),
        ({"score": {"rewards": [{"name": "exact", "weight": 2e6}]}}, "score.rewards.0: weight must be at most 1000000"),
        ({"deploy": {"cpus": {"score": 0.0}}}, "deploy.cpus: score must be positive, not 0.0"),
        (
            {"trainer": {"device": "cuda", "gpus": [1, 1]}},
            "gpus must be different numbers of GPUs, from 0 on, not [1, 1]",
        ),
        ({"trainer": {"gpus": [0]}}, "gpus needs device = 'cuda', not 'cpu'"),
        (
            {"rollout": {"engine": "vllm", "gpus": [0, 1, 2], "tensor_parallel": 2}},
            "gpus must be a multiple of tensor_parallel = 2 GPUs, not [0, 1, 2]",
        ),
        (
            {"trainer": {"device": "cuda", "gpus": [0, 1]}, "rollout": {"gpus": [1, 2]}},
            "trainer.gpus and rollout.gpus share [1]: the trainer uses [0, 1], rollouts [1, 2]. Give each its own",
        ),
        ({"trainer": {"device": "cuda:2"}, "rollout": {"gpus": [2]}}, "trainer.gpus and rollout.gpus share [2]"),
    ],
)
def test_parse_config_rejects_values_out_of_range(table: dict[str, Any], message: str) -> None:
    assert message in error_of(table)


def test_parse_config_reports_all_type_errors() -> None:
    error = error_of({"rollout": {"slots": "a"}, "trainer": {"threads": "b"}})
    assert [line.split(": ")[1] for line in error.splitlines()] == ["rollout.slots", "trainer.threads"]


def test_parse_config_reports_unknown_keys_beside_type_errors() -> None:
    error = error_of({"rollout": {"slot": 1}, "trainer": {"treads": 2, "threads": "b"}, "traner": {}})
    assert [line.split(": ")[1] for line in error.splitlines()] == [
        "unknown key rollout.slot; did you mean 'slots'?",
        "unknown key trainer.treads; did you mean 'threads'?",
        "unknown key traner; did you mean 'trainer'?",
        "trainer.threads",
    ]


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("trainer.optimizer_steps=7", lambda c: c.trainer.optimizer_steps == 7),
        ("trainer.learner.learning_rate=1e-5", lambda c: c.trainer.learner.learning_rate == 1e-5),
        ("trainer.learner.algorithm.name=dapo", lambda c: c.trainer.learner.algorithm.name == "dapo"),
        ('trainer.learner.algorithm.name="dapo"', lambda c: c.trainer.learner.algorithm.name == "dapo"),
        ("trainer.learner.betas=[0.8, 0.9]", lambda c: c.trainer.learner.betas == (0.8, 0.9)),
        ("kafka.bootstrap_servers=localhost:9092", lambda c: c.kafka.bootstrap_servers == "localhost:9092"),
        ("evaluation.sampled=false", lambda c: c.evaluation.sampled is False),
        ("run.folder=/a/b=c", lambda c: c.run.folder == Path("/a/b=c")),
        ("model.path=", lambda c: c.model.path == ""),
        (" rollout.slots =4", lambda c: c.rollout.slots == 4),
        ("prompts.task_args={max_terms = 3}", lambda c: c.prompts.task_args == {"max_terms": 3}),
        ("rollout.environments.0.turns=3", lambda c: c.rollout.environments[0].turns == 3),
    ],
)
def test_load_config_applies_changes(tmp_path: Path, change: str, value: Any) -> None:
    file = tmp_path / "a.toml"
    text = '[trainer]\noptimizer_steps = 3\n[prompts]\ntask = "gcd"\n[run]\nfolder = "x"\n'
    file.write_text(f'{text}[[rollout.environments]]\nname = "guess"\n')
    assert value(load_config(file, [change]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("trainer.optimizer_steps", "expected section.key=value"),
        ("=5", "expected section.key=value"),
        ("trainer.optimizer_steps.x=5", "optimizer_steps is not a section"),
        (
            "score.rewards.1.weight=2",
            "score.rewards has 1 items, counted from 0: set the whole list, as score.rewards=[",
        ),
        ("score.rewards.weight=2", "score.rewards is a list: set a key of one item, as score.rewards.0.weight, or the"),
        ("rollout.environments.0.turns=2", "rollout.environments has no items in the file: set the whole list, as"),
        ("trainer.optimizer_step=5", "did you mean 'optimizer_steps'?"),
        ("trainer.optimizer_steps=many", "Input should be a valid integer (it is 'many')"),
    ],
)
def test_load_config_rejects_invalid_changes(tmp_path: Path, change: str, message: str) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[trainer]\noptimizer_steps = 3\n[[score.rewards]]\nname = "exact"\n')
    with pytest.raises(ConfigError) as caught:
        load_config(file, [change])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), (b"a = [", "is not valid TOML"), (b"\xff\xfe", "is not valid TOML")],
)
def test_load_config_rejects_invalid_files(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "a.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(file)


def test_load_config_rejects_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("table", "prompts", "warm"),
    [
        ({"run": {"seed": 7}}, 7, None),
        ({"run": {"seed": 7}, "prompts": {"task": "gcd"}, "warm_start": {}}, 7, 7),
        ({"run": {"seed": 7}, "prompts": {"task": "gcd", "seed": 2}, "warm_start": {"seed": 3}}, 2, 3),
        ({"prompts": {"task": "gcd", "seed": 2}}, 2, None),
        ({}, 0, None),
    ],
)
def test_sections_inherit_the_seed_of_the_run(table: dict[str, Any], prompts: int, warm: int | None) -> None:
    config = parse_config(table, "my.toml")
    assert config.prompts.seed == prompts
    assert (config.warm_start.seed if config.warm_start is not None else None) == warm


CODE = {"name": "chain_sum", "rewards": [{"name": "code"}]}
MIXED: dict[str, Any] = {
    "run": {"seed": 7},
    "prompts": {
        "max_new_tokens": 40,
        "heldout": 5,
        "tasks": [
            {"name": "sums", "weight": 3.0, "task": "chain_sum", "heldout": 9},
            {"task": "gcd", "max_new_tokens": 200},
            {"name": "mine", "source": "jsonl", "path": "a.jsonl", "seed": 1},
        ],
    },
    "score": {
        "answer": "whole",
        "rewards": [{"name": "exact"}],
        "tasks": [{"name": "gcd", "rewards": [{"name": "numeric"}]}, {"name": "mine", "answer": "boxed"}],
    },
}


def test_tasks_inherit_keys_of_their_section(tmp_path: Path) -> None:
    config = parse_config(MIXED, "my.toml")
    tasks = [(t.task_name, t.weight, t.max_new_tokens, t.heldout, t.seed) for t in config.prompts.mixture]
    assert tasks == [("sums", 3.0, 40, 9, 7), ("gcd", 1.0, 200, 5, 7), ("mine", 1.0, 40, 5, 1)]
    rubrics = {rubric.name: (rubric.answer, rubric.rewards[0].name) for rubric in config.score.tasks}
    assert rubrics == {"gcd": ("whole", "numeric"), "mine": ("boxed", "exact")}
    absolute = with_absolute_paths(config)
    save_config(absolute, tmp_path / "saved.toml")
    assert load_config(tmp_path / "saved.toml") == absolute
    assert [task.path for task in absolute.prompts.mixture] == ["", "", str(Path("a.jsonl").absolute())]
    assert ("prompts.path", Path("a.jsonl")) in list(files_read(config))


def test_section_without_tasks_is_the_only_task() -> None:
    config = parse_config({"prompts": {"task": "gcd"}}, "my.toml")
    assert config.prompts.mixture == (config.prompts,)
    assert config.score.rubrics == (config.score,)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"prompts": {"tasks": [{"tsk": "gcd"}]}}, "unknown key prompts.tasks.tsk; did you mean 'task'?"),
        ({"prompts": {"tasks": [{"name": "a"}]}}, "prompts.tasks.0: task must name a reasoning-gym task"),
        ({"prompts": {"tasks": ["gcd"]}}, "prompts.tasks.0: "),
        ({"prompts": {"tasks": "gcd"}}, "prompts.tasks: "),
        ({"prompts": {"tasks": [{"task": "gcd"}, {"task": "gcd"}]}}, "two have the same name"),
        ({"score": {"tasks": [{"answer": "whole"}]}}, "score.tasks.0: name must be the name of a task"),
        (
            {"score": {"tasks": [{"name": "chain_sun"}]}},
            "no prompts.name or prompts.task is 'chain_sun'; did you mean 'chain_sum'?",
        ),
        ({"score": {"tasks": [{"name": "chain_sum"}, {"name": "chain_sum"}]}}, "a task is named twice"),
        (
            {"score": {"time_limit_s": 2.0, "tasks": [{"name": "chain_sum", "rewards": [{"name": "code"}]}]}},
            "time_limit_s",
        ),
    ],
)
def test_parse_config_rejects_invalid_tasks(table: dict[str, Any], message: str) -> None:
    assert message in error_of(table)


def test_rubrics_accept_any_task_name_for_files() -> None:
    prompts = {"source": "parquet", "path": "a.parquet"}
    config = parse_config({"prompts": prompts, "score": {"tasks": [{"name": "openai/gsm8k"}]}}, "my.toml")
    assert [task.name for task in config.score.tasks] == ["openai/gsm8k"]


def test_parse_config_does_not_modify_its_table() -> None:
    table: dict[str, Any] = {"run": {"seed": 7}, "prompts": {"task": "gcd"}}
    parse_config(table, "my.toml")
    assert table == {"run": {"seed": 7}, "prompts": {"task": "gcd"}}


def test_optional_fields_default_to_none() -> None:
    """Saved files omit None, so a field that may be None must have that default, or it would load as another value."""
    for kind in _dataclasses(Config):
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if type(None) in get_args(hints[field.name]):
                assert field.default is None, f"{kind.__name__}.{field.name}"


def _dataclasses(kind: type) -> list[type]:
    found = [kind]
    for hint in get_type_hints(kind).values():
        inner = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
        found += [each for part in inner if dataclasses.is_dataclass(part) for each in _dataclasses(part)]  # type: ignore[arg-type]
    return found


def test_kafka_client_requires_an_address(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bootstrap_servers is not set"):
        KafkaConfig().client()
    properties = tmp_path / "client.properties"
    properties.write_text("bootstrap.servers=one:1\nclient.id=me\n")
    assert KafkaConfig(client_properties=str(properties)).client().bootstrap_servers == "one:1"
    both = KafkaConfig(bootstrap_servers="two:2", client_properties=str(properties)).client()
    assert both.bootstrap_servers == "two:2"


def test_model_folder_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="path is not set"):
        Config().model_folder()
    missing = parse_config({"model": {"path": str(tmp_path / "no")}}, "my.toml")
    with pytest.raises(ConfigError, match="there is no folder"):
        missing.model_folder()
    assert parse_config({"model": {"path": str(tmp_path)}}, "my.toml").model_folder() == tmp_path


@pytest.mark.parametrize(
    ("table", "dtype"),
    [
        ({}, "float32"),
        ({"trainer": {"device": "cuda"}}, "bfloat16"),
        ({"trainer": {"device": "cuda:1"}, "rollout": {"dtype": "float32"}}, "float32"),
    ],
)
def test_rollout_dtype_follows_the_device_of_the_trainer(table: dict[str, Any], dtype: str) -> None:
    assert parse_config(table, "my.toml").rollout.dtype == dtype
