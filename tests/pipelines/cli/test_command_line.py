"""The command line as a whole: every command says how it is used, and ends as it should."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from pipelines.cli import main as command_line
from pipelines.cli.lazy import CommandModule, lazy_group
from pipelines.cli.main import COMMANDS, main
from pipelines.cli.output import Report, Stream, show


def commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A command, and those below it where it is a group."""
    yield words, command
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, (*words, name))


def every_command() -> Iterator[tuple[tuple[str, ...], Any]]:
    import importlib

    yield (), typer.main.get_command(command_line.app)
    for name, where in COMMANDS.items():
        app = importlib.import_module(where.module).app
        yield from commands(typer.main.get_command(app), (name,))


@pytest.mark.parametrize(("words", "command"), list(every_command()), ids=lambda part: str(part)[:40])
def test_every_command_has_examples_of_itself(words: tuple[str, ...], command: Any) -> None:
    text = command.help or ""
    spelt = " ".join(("laminar", *words))
    examples = text.partition("Examples:")[2].split("\n")
    assert any(f"{line} ".startswith(f"  {spelt} ") for line in examples), f"{spelt} has no examples"


def test_help_is_quick_and_loads_no_command() -> None:
    code = (
        "import sys\nfrom pipelines.cli.main import main\ntry:\n    main(['--help'])\n"
        "except SystemExit as ended:\n    assert not ended.code\n"
        "loaded = {'kafka', 'pyarrow', 'apache_beam', 'torch'} & set(sys.modules)\nassert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert name in done.stdout


def test_installed_as_laminar() -> None:
    import importlib.metadata

    (script,) = importlib.metadata.entry_points(group="console_scripts", name="laminar")
    assert script.load() is command_line.main


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`laminar fail WORD` raises that kind of error."""
    app = typer.Typer(cls=lazy_group({}), pretty_exceptions_enable=False)

    @app.callback()
    def root() -> None: ...

    @app.command()
    def fail(kind: str) -> None:
        errors = {"runtime": RuntimeError("one\ntwo"), "key": KeyError("x"), "stop": KeyboardInterrupt()}
        raise errors[kind]

    monkeypatch.setattr(command_line, "app", app)


@pytest.mark.parametrize(
    ("kind", "code", "says"),
    [
        ("runtime", 1, "laminar: one; two\n"),
        ("key", 1, "laminar: KeyError: 'x' (--debug shows where)\n"),
        ("stop", 130, ""),
    ],
)
def test_errors_are_one_line(
    failing: None, capsys: pytest.CaptureFixture[str], kind: str, code: int, says: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fail", kind])
    assert ended.value.code == code
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", says)


def test_debug_shows_where(failing: None) -> None:
    with pytest.raises(RuntimeError, match="one"):
        main(["fail", "--debug", "runtime"])


def test_a_command_is_imported_when_it_is_called(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "late_command.py").write_text(
        "import typer\napp = typer.Typer()\n\n@app.command()\ndef late(word: str) -> None:\n    print('late', word)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    app = typer.Typer(cls=lazy_group({"late": CommandModule("late_command", "Comes late.")}))
    app.callback()(lambda: None)
    with pytest.raises(SystemExit, match="0"):
        app(["--help"])
    assert "Comes late." in capsys.readouterr().out
    assert "late_command" not in sys.modules
    with pytest.raises(SystemExit, match="0"):
        app(["late", "word"])
    assert capsys.readouterr().out == "late word\n"


def test_answers_are_printed_in_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    show(Report({"a": 1}, lambda: "text [bold]"))
    show(Report({"a": "ü"}, lambda: "", as_json=True))
    show(Stream(({"a": n} for n in range(2)), lambda item: f"a is {item['a']}"))
    show(Stream([{"a": 1}], str, as_json=True))
    show(None)
    assert capsys.readouterr().out == 'text [bold]\n{\n "a": "ü"\n}\na is 0\na is 1\n{"a": 1}\n'
    with pytest.raises(typer.Exit) as ended:
        show(Report({}, lambda: "no", exit_code=1))
    assert ended.value.exit_code == 1
    with pytest.raises(TypeError, match="a command returned int"):
        show(3)
