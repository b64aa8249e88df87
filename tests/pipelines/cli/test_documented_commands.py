"""The commands and configuration keys that the documents name exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from documents import DOCUMENTS, EACH

from pipelines.cli.reference import every_command
from pipelines.config_reference import sections, settings

GENERATED = {"cli.md", "configuration.md"}
_CODE = re.compile(r"^```\w*\n(.*?)^```$|`([^`\n]+(?:\n[^`\n]+)?)`", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^ *(?:\$ |\w+=\S+ |nohup |timeout \S+ )*(?:\S*/)?laminar((?: +[^\s#|;>&)`]+)+)", re.MULTILINE)
_KEY = re.compile(r"`(\w+(?:\.\w+)+)`")
NO_KEYS = {
    "gateway.pem",
    "gateway.secret",
    "model.generate",
    "model.seed",
    "relay.laminar",
    "relay.pem",
    "relay.secret",
}
"""Files, methods, host names; and `model.seed`, below the section `warm_start`."""


@cache
def commands() -> dict[tuple[str, ...], Any]:
    return dict(every_command())


def problem(words: list[str]) -> str | None:
    """The first unknown command or option in the arguments `words` of `laminar`; None if all exist."""
    path: tuple[str, ...] = ()
    while words and (*path, words[0]) in commands():
        path, words = (*path, words[0]), words[1:]
    if path == ("export",):  # `export TOPIC` is `export topic TOPIC`
        path = ("export", "topic")
    command = commands()[path]
    if getattr(command, "commands", None) and words and re.match("[a-z]", words[0]):
        return f"{words[0]} is no command of laminar {' '.join(path)}"
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
    own = words[: words.index("--")] if "--" in words else words
    unknown = [word for word in own if re.match("--?[a-zA-Z]", word) and re.split("=", word)[0] not in known]
    return f"laminar {' '.join(path)} has no {unknown[0]}" if unknown else None


def documented(text: str) -> Iterator[list[str]]:
    """The arguments of every `laminar` in the code of a document."""
    for fence, inline in _CODE.findall(text):
        code = re.sub(r"\\\n|\n(?=\S)" if inline else r"\\\n", " ", fence or inline)
        for found in _COMMAND.findall(code):
            yield [word for word in found.split() if not word.startswith("[")]


@EACH
def test_documented_commands_and_options_exist(path: Path) -> None:
    if path.name in GENERATED:
        return
    found = [(words, problem(words)) for words in documented(path.read_text("utf-8"))]
    assert not [f"laminar {' '.join(words)}: {wrong}" for words, wrong in found if wrong]


@EACH
def test_documented_keys_exist(path: Path) -> None:
    known = settings().keys() | {section.key.removesuffix("[]") for section in sections()} | NO_KEYS
    first = {key.partition(".")[0] for key in settings()}
    found = {key for key in _KEY.findall(path.read_text("utf-8")) if key.partition(".")[0] in first}
    assert not {key for key in found - known if not key.endswith((".py", ".toml", ".json", ".md"))}


@pytest.mark.parametrize("words", ["train replay latest --run first", "runs pause --never", "weights fetch latest"])
def test_a_documented_command_that_is_none_is_seen(words: str) -> None:
    (found,) = documented(f"`laminar {words}`")
    assert problem(found) is not None


def test_documents_name_many_commands() -> None:
    assert sum(len(list(documented(path.read_text("utf-8")))) for path in DOCUMENTS if path.name not in GENERATED) > 200
