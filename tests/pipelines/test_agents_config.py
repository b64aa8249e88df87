"""The sections [agents] and [gateway], and the roles that they add."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelines.config import ConfigError, load_config, parse_config
from pipelines.roles import PIPELINES, pipelines_of, processes_of, roles_of
from pipelines.run.paths import files_read, with_absolute_paths

AGENT = {"environment": "agent", "task": "chain_sum"}


def config_of(**sections: Any) -> Any:
    return parse_config({"model": {"path": "model"}, **sections}, "my.toml")


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"prompts": AGENT}, "needs a section [agents] with a command or a function, or [gateway]"),
        ({"agents": {"command": ["x"]}}, "[agents] needs prompts for agents: set prompts.environment = 'agent'"),
        ({"prompts": AGENT, "agents": {"command": ["x"], "function": "a:b"}}, "command and function: set one of them"),
        ({"prompts": AGENT, "agents": {"function": "solve"}}, "must be 'module:function' or 'file.py:function'"),
        ({"prompts": AGENT, "agents": {"concurrency": 0}}, "concurrency must be at least 1, not 0"),
        ({"prompts": AGENT, "agents": {"timeout_s": 0.0}}, "timeout_s must be positive"),
        ({"gateway": {"host": "0.0.0.0"}}, "set certificate_file and key_file"),
        ({"gateway": {"key_file": "me.key"}}, "certificate_file and key_file: set both or neither"),
        ({"gateway": {"port": 70000}}, "gateway: port must be at most 65535, not 70000"),
        ({"gateway": {}, "rollout": {"engine": "emulated"}}, "agents need an engine that generates text"),
    ],
)
def test_invalid_agents_sections_are_errors(sections: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config_of(**sections)
    assert error in str(raised.value)


def test_agents_add_roles_with_processes_of_their_own() -> None:
    config = config_of(prompts=AGENT, agents={"command": ["x"]}, gateway={"processes": 2}, run={"layout": "compact"})
    names = [role.name for role in roles_of(config)]
    assert names[2:5] == ["agents-0", "gateway-0", "gateway-1"]
    assert {"agents-0", "gateway-0", "gateway-1"} <= {process.name for process in processes_of(config)}
    assert not {"agents", "gateway"} & {role.pipeline for role in roles_of(config_of())}
    assert {"agents", "gateway"} == {*pipelines_of(config)} - {*PIPELINES}
    assert pipelines_of(config_of()) == PIPELINES


def test_files_of_agents_are_absolute_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gateway = {"certificate_file": "me.pem", "key_file": "me.key", "secret_file": "secret"}
    config = with_absolute_paths(config_of(prompts=AGENT, agents={"function": "my.py:solve"}, gateway=gateway))
    assert config.agents.function == f"{tmp_path}/my.py:solve"
    found = dict(files_read(config))
    assert found["agents.function"] == tmp_path / "my.py"
    assert found["gateway.secret_file"] == tmp_path / "secret"


def test_agents_example_names_its_agent() -> None:
    folder = Path(__file__).parents[2]
    config = load_config(folder / "examples" / "agents.toml")
    assert config.agents is not None
    assert (folder / config.agents.function.partition(":")[0]).exists()
