"""A new user's folder with questions, a reward, an environment and a configuration, and the commands started there."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from laminar_runs import Command, CommandServer

QUESTIONS = [{"question": f"What is {n} + 1?", "answer": str(n + 1), "unit": "apples"} for n in range(39)]
UNUSABLE = [{"question": "And now?", "answer": None, "unit": "apples"}]
"""One of forty rows: refused, but few enough."""
NOISE = re.compile(
    r"apitools|absl|^E0000|Loading weights|Writing model|\w+Warning:|Traceback|\[Errno|: : |^:|"
    r"\b(?:INFO|WARNING|DEBUG)\b",
    re.M,
)
"""What no command prints."""
CHAT_TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
REWARD = """
from my_letters import letters


def variety(text: str, reference: dict) -> float:
    return min(letters(text) / 12, 1.0) if reference["unit"] == "apples" else 0.0
"""
BESIDE = """
def letters(text: str) -> int:
    return len(set(text))
"""
ENVIRONMENT = """
class Echo:
    stop = ("\\n",)

    def reset(self, prompt):
        return "Once more.\\n"

    def step(self, text):
        solved = len(set(text)) % 2 == 1
        return "Again.\\n", float(solved), solved, {}
"""


class Answer(NamedTuple):
    """The exit code of a command, and what it printed."""

    code: int
    text: str

    @property
    def json(self) -> Any:
        """What it printed, as JSON; lines before it are those of a check."""
        lines = self.text.splitlines()
        first = next(at for at, line in enumerate(lines) if line[:1] in ("{", "["))
        return json.loads("\n".join(lines[first:]))


class Shell:
    """Starts `laminar` commands in the folder `here`; what they print is kept in `outputs`."""

    def __init__(self, server: CommandServer, here: Path, outputs: Path) -> None:
        self.server, self.here = server, here
        self._files = (outputs / f"{number}.txt" for number in count())

    def __call__(self, *words: str, here: Path | None = None, seconds: float = 240.0) -> Answer:
        """Run `laminar WORDS` to its end."""
        command = self.start(*words, here=here)
        return Answer(command.wait(seconds), command.output())

    def start(self, *words: str, here: Path | None = None, terminal: Path | None = None) -> Command:
        """Start `laminar WORDS`, at `terminal` if that is given."""
        return Command(self.server, here or self.here, *words, output=terminal or next(self._files))


def write_folder(folder: Path, model: Path) -> dict[str, Any]:
    """Write a user's files to the new folder `folder`; returns the configuration in its `train.toml`."""
    folder.mkdir(parents=True)
    shutil.copytree(model, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in [*QUESTIONS, *UNUSABLE]))
    (folder / "my_reward.py").write_text(REWARD)
    (folder / "my_letters.py").write_text(BESIDE)
    (folder / "my_environment.py").write_text(ENVIRONMENT)
    table: dict[str, Any] = {
        "run": {"layout": "compact", "warn_steps": 2},
        "model": {"path": "model"},
        "prompts": {
            "source": "jsonl",
            "path": "rows.jsonl",
            "extra_columns": ["unit"],
            "chat_template": True,
            "heldout": 8,
            "max_new_tokens": 16,
            "samples_per_prompt": 4,
        },
        "score": {"rewards": [{"name": "my_reward.py:variety"}]},
        "experience": {"global_batch": 16},
        "trainer": {
            "optimizer_steps": 4,
            "checkpoint_every": 2,
            "learner": {"learning_rate": 1e-3, "algorithm": {"name": "grpo"}},
        },
    }
    (folder / "train.toml").write_text(f"#:schema laminar.schema.json\n{tomli_w.dumps(table)}")
    return table


def progress_lines(text: str) -> list[str]:
    """The lines of a run's progress."""
    return re.findall(r"^\[\d+:\d\d\] .*", text, re.M)


def printed_commands(text: str) -> list[list[str]]:
    """The commands for a run that `text` tells its reader to give, as words without the program."""
    quoted = re.findall(r"`\S*laminar ([^`]*)`", text)
    listed = re.findall(r"^ *\S*laminar (.*?)(?:  .*|$)", text, re.M)
    return [shlex.split(command) for command in [*quoted, *listed]]
