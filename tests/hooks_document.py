"""The example files of docs/hooks.md, and its configuration in two versions: some sections are alternatives."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

TEXT = (Path(__file__).parents[1] / "docs" / "hooks.md").read_text("utf-8")
SECTIONS = [tomllib.loads(each) for each in re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)]
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", TEXT, re.DOTALL))
(SCRIPT,) = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)


def write_files(folder: Path) -> None:
    """Write the document's files to `folder`."""
    for name, source in FILES.items():
        (folder / name).write_text(source)
    (folder / "scale.sh").write_text(SCRIPT)
    (folder / "scale.sh").chmod(0o755)


def with_functions() -> dict[str, Any]:
    """The first version of each section, for prompts that an environment or an agent plays."""
    table = {name: section for each in reversed(SECTIONS) for name, section in each.items()}
    tasks = [{"name": "played"}, {"name": "agents", "environment": "agent"}]
    return {**table, "prompts": {"task": "gcd", **table["prompts"], "tasks": tasks}}


def with_programs(folder: Path) -> dict[str, Any]:
    """The last version of each section: a curriculum, an agent's command and an actuator of files in `folder`."""
    table = {name: section for each in SECTIONS for name, section in each.items()}
    assert table["autoscaling"]["command"] == ["/opt/scale.sh"]
    scaling = {**table["autoscaling"], "command": [str(folder / "scale.sh")]}
    return {**table, "autoscaling": scaling, "prompts": {**table["prompts"], "environment": "agent"}}
