"""The whole command line: help, printing, errors and exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pytest
import typer
from typer.testing import CliRunner

from infra.runners.flink_jobs import CANCEL_S
from pipelines.cli import main as command_line
from pipelines.cli.lazy import CommandModule, lazy_group
from pipelines.cli.main import COMMANDS, main
from pipelines.cli.option_sets import Commands
from pipelines.cli.reference import every_command, reference
from pipelines.distribution import LAMINAR
from pipelines.present.output import Report, RowOutput, show


@pytest.mark.parametrize(("words", "command"), list(every_command()), ids=lambda part: str(part)[:40])
def test_help_of_every_command_has_examples(words: tuple[str, ...], command: Any) -> None:
    text = command.help or ""
    name = " ".join(("laminar", *words))
    examples = text.partition("Examples:")[2].split("\n")
    assert any(f"{line} ".startswith(f"  {name} ") for line in examples), f"{name} has no examples"


def test_help_takes_no_brackets_for_markup() -> None:
    assert {words for words, command in every_command() if command.rich_markup_mode is not None} == set()


def test_cli_reference_matches_every_help_text() -> None:
    written = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
    assert written == reference(), "out of date: `make generated`"


@pytest.mark.parametrize(("name", "seconds"), [("stop", 60), ("resume", 120)])
def test_help_has_the_time_that_a_stop_may_take(name: str, seconds: int) -> None:
    (command,) = (command for words, command in every_command() if words == ("runs", name))
    (option,) = (each for each in command.params if each.name == "timeout")
    assert f"by default {seconds}, and {seconds + CANCEL_S:g} " in option.help


@pytest.mark.parametrize(
    ("form", "printed"),
    [
        ("table", "A  B-C\n1  -\n2  -\n3  é\n"),
        ("lines", "1!\n2!\n3!\n"),
        ("json", '[\n{"a":1,"b_c":null},\n{"a":2,"b_c":null},\n{"a":3,"b_c":"é"}\n]\n'),
        ("jsonl", '{"a":1,"b_c":null}\n{"a":2,"b_c":null}\n{"a":3,"b_c":"é"}\n'),
        ("csv", "a,b_c\n1,\n2,\n3,é\n"),
    ],
)
def test_show_prints_rows_of_all_parts_in_every_format(
    capsys: pytest.CaptureFixture[str], form: Any, printed: str
) -> None:
    parts = [[{"a": 1, "b_c": None}], [], [{"a": 2, "b_c": None}, {"a": 3, "b_c": "é"}]]
    show(RowOutput(iter(parts), ("a", "b_c"), form, "nothing", lambda row: f"{row['a']}!"))
    assert "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines()) == printed


@pytest.mark.parametrize(("form", "printed"), [("table", "nothing\n"), ("json", "[]\n"), ("jsonl", ""), ("csv", "")])
def test_show_prints_no_rows_in_every_format(capsys: pytest.CaptureFixture[str], form: Any, printed: str) -> None:
    with pytest.raises(typer.Exit):
        show(RowOutput([[]], ("a",), form, "nothing", exit_code=1))
    assert capsys.readouterr().out == printed


def test_show_reports_on_stderr_that_there_are_no_lines(capsys: pytest.CaptureFixture[str]) -> None:
    show(RowOutput([[]], ("a",), "lines", "no matching rows"))
    show(RowOutput([[], [{"a": 1}]], ("a",), "lines", "no matching rows"))
    assert capsys.readouterr() == ("{'a': 1}\n", "no matching rows\n")


def test_every_short_option_has_one_meaning() -> None:
    long_names: dict[str, set[str]] = {}
    for _, command in every_command():
        for option in (each for each in command.params if each.param_type_name == "option"):
            long = [name for name in option.opts if name.startswith("--")]
            for short in (name for name in option.opts if not name.startswith("--")):
                long_names.setdefault(short, set()).update(long)
    assert {short: names for short, names in long_names.items() if len(names) > 1} == {}
    assert (long_names["-o"], long_names["-O"], long_names["-f"]) == ({"--offset"}, {"--output"}, {"--follow"})


def test_show_prints_one_arrow_stream_with_schema(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.utf8())])
    show(RowOutput([[{"a": 1, "b": None}], [{"a": 2, "b": "x"}]], ("a",), "arrow", schema=lambda: schema))
    rows = pa.ipc.open_stream(capfdbinary.readouterr().out).read_all()
    assert (rows.schema, rows.to_pylist()) == (schema, [{"a": 1, "b": None}, {"a": 2, "b": "x"}])


@dataclass(frozen=True)
class Place:
    """An option set."""

    x: Annotated[int, typer.Option("--x")] = 0
    y: Annotated[int, typer.Option("--y")] = 0


def test_option_set_is_one_parameter() -> None:
    found: list[Any] = []
    app = Commands()

    @app.command()
    def go(place: Place, word: str, loud: bool = False) -> None:
        found.append((place, word, loud))

    CliRunner().invoke(app, ["here", "--y", "3", "--loud"])
    go(Place(1), "there")
    assert found == [(Place(0, 3), "here", True), (Place(1), "there", False)]


def test_help_imports_no_heavy_package() -> None:
    code = (
        "import sys\nfrom pipelines.cli.main import main\ntry:\n    main(['--help'])\n"
        "except SystemExit as ended:\n    assert not ended.code\n"
        "loaded = {'kafka', 'pyarrow', 'apache_beam', 'torch'} & set(sys.modules)\nassert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert name in done.stdout


def test_entry_point_is_main() -> None:
    import importlib.metadata

    (script,) = importlib.metadata.entry_points(group="console_scripts", name="laminar")
    assert script.load() is command_line.main


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`laminar fail KIND` raises an error of that kind."""
    app = typer.Typer(cls=lazy_group({}), pretty_exceptions_enable=False)

    @app.callback()
    def root() -> None: ...

    @app.command()
    def fail(kind: str) -> None:
        errors = {"runtime": RuntimeError("one\ntwo"), "key": KeyError("x"), "stop": KeyboardInterrupt()}
        errors |= {"empty": AssertionError(), "port": OSError(98, "Address already in use")}
        errors |= {
            "file": PermissionError(13, "Permission denied", "/etc/x"),
            "own": FileExistsError("x exists already"),
        }
        raise errors[kind]

    monkeypatch.setattr(command_line, "app", app)


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        ("runtime", 1, "laminar: one; two\n"),
        ("key", 1, "laminar: KeyError: 'x' (use --debug for the traceback)\n"),
        ("stop", 130, ""),
        ("empty", 1, "laminar: AssertionError (use --debug for the traceback)\n"),
        ("port", 1, "laminar: Address already in use\n"),
        ("file", 1, "laminar: /etc/x: Permission denied\n"),
        ("own", 1, "laminar: x exists already\n"),
    ],
)
def test_main_prints_errors_as_one_line(
    failing: None, capsys: pytest.CaptureFixture[str], kind: str, code: int, message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fail", kind])
    assert ended.value.code == code
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("runs", "status", "nosuch"),
            "unexpected extra argument(s) (nosuch); a run is named by --run: --run nosuch\n",
        ),
        (("cost", "a", "b"), "unexpected extra argument(s) (b)\n"),
        (("export", "experiences", "x", "--view", "csv"), "Invalid value for '--view': 'csv' is not one of 'full', "),
    ],
)
def test_usage_errors_name_what_to_write(words: tuple[str, ...], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--help",), ("config", "run.seed"), ("runs", "list", "--json")])
def test_command_succeeds_whose_reader_has_ended(words: tuple[str, ...], tmp_path: Path) -> None:
    reader, output = os.pipe()
    os.close(reader)
    try:
        command = [*LAMINAR, *words]
        ended = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, cwd=tmp_path, check=False, timeout=60)
    finally:
        os.close(output)
    assert (ended.returncode, ended.stderr) == (0, b"")


def run_of(code: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    code = f"import sys\nfrom pipelines.cli.main import main, _print_all_text\n{code}"
    command, environment = [sys.executable, "-c", code], {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, env=environment, check=False, timeout=60)


def test_main_prints_characters_that_an_encoding_lacks() -> None:
    code = "_print_all_text(); print('0.2 → 0.8'); sys.stdout.isatty = lambda: True; _print_all_text(); print('→')"
    assert run_of(code, PYTHONIOENCODING="latin-1").stdout == b"0.2 \\u2192 0.8\n?\n"


def test_command_succeeds_without_an_output(tmp_path: Path) -> None:
    command = ["sh", "-c", '"$@" >&- 2>&-', "sh", *LAMINAR, "config", "run.seed"]
    assert subprocess.run(command, cwd=tmp_path, check=False, timeout=60).returncode == 0


def test_main_raises_with_debug(failing: None) -> None:
    with pytest.raises(RuntimeError, match="one"):
        main(["fail", "--debug", "runtime"])


def test_lazy_group_imports_command_when_called(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
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


def test_show_prints_every_result_class(capsys: pytest.CaptureFixture[str]) -> None:
    show(Report({"a": 1}, lambda: "text [bold]"))
    show(Report({"a": "ü"}, lambda: "", as_json=True))
    show(None)
    assert capsys.readouterr().out == 'text [bold]\n{\n "a": "ü"\n}\n'
    with pytest.raises(typer.Exit) as ended:
        show(Report({}, lambda: "no", exit_code=1))
    assert ended.value.exit_code == 1
    with pytest.raises(TypeError, match="a command returned int"):
        show(3)


def test_read_only_commands_write_columns_without_numpy() -> None:
    code = (
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from pipelines.cli.lazy import light_imports\n"
        "with light_imports():\n"
        "    from record_samples import SAMPLES\n    from schemas.block import Block\n"
        "    assert all(len(Block.of([record])) == 1 for record in SAMPLES.values())\n"
        "assert 'numpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
