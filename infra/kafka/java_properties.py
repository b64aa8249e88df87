"""Reads and writes Java `.properties` files, and the references to secrets in their values."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_SPECIAL = re.compile(r"[^\x20-\x7e]|\\|^ ")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
# The key ends at the first `=`, `:` or white space that is not escaped.
_ENTRY = re.compile(r"(?P<key>(?:\\.|[^\\=:\s])+)\s*[=:\s]?\s*(?P<value>.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$\{(?P<source>[a-z]+):(?P<name>[^}]*)\}")


def parse_properties(text: str) -> dict[str, str]:
    """Return the entries of a Java properties text, with comments, continued lines and escapes as in Java.

    A value may contain `=` and `:`. Raises ValueError, with the line number, if a name occurs twice (Java silently
    takes the last).
    """
    entries: dict[str, str] = {}
    for number, line in _logical_lines(text):
        match = _ENTRY.match(line)
        if match is None:
            raise ValueError(f"line {number}: no name before the separator in {line!r}")
        key = _unescape(match["key"])
        if key in entries:
            raise ValueError(f"line {number}: {key} occurs twice")
        entries[key] = _unescape(match["value"])
    return entries


def properties_text(entries: Mapping[str, str]) -> str:
    """Return `entries`, whose names are plain, as a Java properties text, in ASCII: any encoding reads it alike."""
    return "".join(f"{name}={_SPECIAL.sub(_escaped, value)}\n" for name, value in entries.items())


def expand_references(value: str, environment: Mapping[str, str] | None = None) -> str:
    """Return a value with `${env:NAME}`, `${file:path}` and `${file:path:key}` (of a properties file) expanded.

    The final line break of a file is removed. Raises ValueError, which never shows the value, if a variable is not set,
    a file cannot be read or lacks the key, or the kind of reference is unknown.
    """
    variables = os.environ if environment is None else environment

    def replacement(match: re.Match[str]) -> str:
        source, name = match["source"], match["name"]
        if source == "env":
            if name not in variables:
                raise ValueError(f"{match[0]}: the environment variable {name} is not set")
            return variables[name]
        if source == "file":
            path, _, key = name.rpartition(":")
            try:
                if path and not Path(name).exists():
                    return parse_properties(Path(path).read_text("utf-8"))[key]
                return Path(name).read_text("utf-8").rstrip("\r\n")
            except OSError as error:
                raise ValueError(f"{match[0]}: {error.strerror}") from error
            except KeyError as error:
                raise ValueError(f"{match[0]}: {path} has no {key}") from error
        raise ValueError(f"{match[0]}: only ${{env:NAME}}, ${{file:path}} and ${{file:path:key}} are supported")

    return _REFERENCE.sub(replacement, value)


def has_reference(value: str) -> bool:
    """Whether a reference is in a value, as for the password in a `sasl.jaas.config`."""
    return _REFERENCE.search(value) is not None


def is_reference(value: str) -> bool:
    """Whether a value is exactly one reference: it may be shown, unlike the secret it refers to."""
    return _REFERENCE.fullmatch(value) is not None


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number of the first line, text) with continued lines joined, without comments and blank lines."""
    first, joined = 0, ""
    for number, raw in enumerate(re.split(r"\r\n|\r|\n", text), start=1):
        line = raw.lstrip()
        if not joined:
            if not line or line[0] in "#!":
                continue
            first = number
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:  # an even number is escaped backslashes, not a continuation
            joined += line[:-1]
            continue
        yield first, joined + line
        joined = ""
    if joined:
        yield first, joined


def _unescape(text: str) -> str:
    def character(match: re.Match[str]) -> str:
        escaped = match[1]
        return chr(int(escaped[1:], 16)) if len(escaped) == 5 else _ESCAPES.get(escaped, escaped)

    units = _ESCAPE.sub(character, text)  # a character beyond U+FFFF is two escapes
    return units.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def _escaped(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))
