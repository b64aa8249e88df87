"""Java properties text: read as Java reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.kafka.java_properties import expand_references, is_reference, parse_properties, properties_text


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("a=1\nb = 2\nc: 3\nd 4\n", {"a": "1", "b": "2", "c": "3", "d": "4"}),
        ("# no\n! no\n\n  a=#1\n", {"a": "#1"}),
        ('jaas=Module required username="u" password="p=w";', {"jaas": 'Module required username="u" password="p=w";'}),
        ("servers=a:1,\\\n    b:2,\\\n    c:3\n", {"servers": "a:1,b:2,c:3"}),
        ("path=C:\\\\dir\\\\\nnext=1\n", {"path": "C:\\dir\\", "next": "1"}),  # an escaped backslash continues nothing
        ("a\\ b\\=c=\\u0041\\tx\n", {"a b=c": "A\tx"}),
        ("empty=\nbare\n", {"empty": "", "bare": ""}),
        ("a==1\r\nb=2", {"a": "=1", "b": "2"}),
    ],
)
def test_parse_properties_matches_java(text: str, entries: dict[str, str]) -> None:
    assert parse_properties(text) == entries


def test_properties_text_is_read_alike_in_any_encoding() -> None:
    entries = {"log.dirs": "/läufe/a\\tb/🎉", "b": " =: x\n", "c": ""}
    text = properties_text(entries)
    assert text.splitlines()[0] == r"log.dirs=/l\u00e4ufe/a\u005ctb/\ud83c\udf89"
    assert parse_properties(text) == entries


@pytest.mark.parametrize(
    ("text", "message"),
    [("a=1\n\na=2\n", "line 3: a occurs twice"), ("a=1\n=2\n", "line 2: no name before the separator")],
)
def test_parse_properties_names_invalid_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_properties(text)


def test_expand_references_reads_variables_and_files(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("p=$w\n")
    value = f"${{env:USER_NAME}} and ${{file:{tmp_path / 'password'}}}, ${{plain"
    assert expand_references(value, {"USER_NAME": "alice"}) == "alice and p=$w, ${plain"
    (tmp_path / "login.properties").write_text("# a login\na.b = x\\\n  y\n")
    assert expand_references(f"<${{file:{tmp_path}/login.properties:a.b}}>", {}) == "<xy>"


def test_expand_references_is_not_recursive() -> None:
    assert expand_references("${env:A}", {"A": "${env:B}", "B": "no"}) == "${env:B}"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("secret ${env:NOT_THERE}", "NOT_THERE is not set"),
        ("secret ${file:/not/there}", "/not/there.*No such file"),
        ("secret ${file:/dev/null:a.b}", "/dev/null has no a.b"),
        ("secret ${vault:x}", r"only \$\{env:NAME\}, \$\{file:path\} and \$\{file:path:key\}"),
    ],
)
def test_expand_references_error_hides_the_value(value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        expand_references(value, {})
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(("value", "expected"), [("${env:A}", True), ("x${env:A}", False), ("a", False)])
def test_is_reference_accepts_only_a_bare_reference(value: str, expected: bool) -> None:
    assert is_reference(value) is expected
