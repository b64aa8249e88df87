"""Escapes control and bidirectional characters in text written by others, before it is shown to a person.

A terminal executes control characters: it moves the cursor, overwrites text, sets the clipboard. Unicode's
bidirectional controls, line separators and invisible tags make text read as something else. `\\n` and `\\t` are kept
where text may have several lines.
"""

from __future__ import annotations

import logging
import re
import sys

_CONTROL_CHARACTERS = (
    "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f"
)
_ANY = re.compile(f"[{_CONTROL_CHARACTERS}]")
_EXCEPT_NEWLINE_TAB = re.compile(f"(?![\n\t])[{_CONTROL_CHARACTERS}]")
_EXCEPT_NEWLINE_TAB_NUL = re.compile(f"(?![\n\t\0])[{_CONTROL_CHARACTERS}]")
_FORMULA = re.compile("(?:^|(?<=[;\t\n]))(?=[^\\S\t\n]*['\"]*[=+\\-@\uff1d\uff0b\uff0d\uff20])|^(?=[\t\n])")
"""Where a formula begins. In some languages a spreadsheet begins a cell after `;` or a tab, whatever is quoted."""


def escape_control_characters(text: str) -> str:
    """Return `text` with control characters escaped as `\\x1b` or `\\u202e`; newlines and tabs are kept."""
    return text if text.isascii() and text.isprintable() else _EXCEPT_NEWLINE_TAB.sub(_backslash_escape, text)


def escape_to_one_line(text: str) -> str:
    """Return `text` with all control characters escaped, newlines and tabs included."""
    return text if text.isascii() and text.isprintable() else _ANY.sub(_backslash_escape, text)


def escape_keeping_nul(text: str) -> str:
    """As `escape_control_characters`, but keep NUL: `xargs -0` separates records by it, and terminals ignore it."""
    return text if text.isascii() and text.isprintable() else _EXCEPT_NEWLINE_TAB_NUL.sub(_backslash_escape, text)


def escape_json(text: str) -> str:
    """Return JSON `text` with control characters as JSON escapes; the value is unchanged."""
    return text if text.isascii() and text.isprintable() else _EXCEPT_NEWLINE_TAB.sub(_json_escape, text)


def escape_csv_cell(text: str) -> str:
    """Return `text` as a CSV cell; a quote is put before what a spreadsheet would run as a formula."""
    return _FORMULA.sub("'", escape_control_characters(text))


def print_escaped(text: str = "", *, err: bool = False, end: str = "\n") -> None:
    """Print `text`, with control characters escaped, at once."""
    print(escape_control_characters(text), end=end, file=sys.stderr if err else sys.stdout, flush=True)


class EscapingFormatter(logging.Formatter):
    """Formats log lines and their tracebacks with control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted line, escaped."""
        return escape_control_characters(super().format(record))


def _backslash_escape(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _json_escape(match: re.Match[str]) -> str:
    number = ord(match[0])
    if number < 0x10000:
        return f"\\u{number:04x}"
    return f"\\u{0xD800 + (number - 0x10000 >> 10):04x}\\u{0xDC00 + (number & 0x3FF):04x}"
