"""Text that others wrote, as a person may see it: what would steer a terminal, or change the order of what is read,
is spelt out.

A terminal takes control characters as commands: it moves its cursor, rewrites what stands there, sets the clipboard.
Unicode's bidirectional controls, line separators and invisible tags make text read as what it is not. `\\n` and `\\t`
stay where text may have lines.
"""

from __future__ import annotations

import logging
import re

_STEERS = (
    "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f"
)
_ALL = re.compile(f"[{_STEERS}]")
_BUT_LINES = re.compile(f"(?![\n\t])[{_STEERS}]")
_BUT_SEPARATORS = re.compile(f"(?![\n\t\0])[{_STEERS}]")
_FORMULA = re.compile("\\s*['\"]?[=+\\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]")


def visible(text: str) -> str:
    """`text` with what steers a terminal spelt out, as `\\x1b` or `\\u202e`; newlines and tabs stay."""
    return text if text.isascii() and text.isprintable() else _BUT_LINES.sub(_spelt, text)


def one_line(text: str) -> str:
    """`text` as `visible` makes it, and on one line."""
    return text if text.isascii() and text.isprintable() else _ALL.sub(_spelt, text)


def lines(text: str) -> str:
    """`text` as `visible` makes it; NUL, which tools separate records by (`xargs -0`) and terminals ignore, stays."""
    return text if text.isascii() and text.isprintable() else _BUT_SEPARATORS.sub(_spelt, text)


def visible_json(text: str) -> str:
    """The same JSON with what steers a terminal as JSON's own escapes: it means the same."""
    return text if text.isascii() and text.isprintable() else _BUT_LINES.sub(_escaped, text)


def csv_cell(text: str) -> str:
    """`text` as a cell that no spreadsheet takes for a formula: a quote goes before what would be one."""
    shown = visible(text)
    return f"'{shown}" if _FORMULA.match(shown) else shown


class VisibleFormatter(logging.Formatter):
    """Log lines, and tracebacks under them, with what steers a terminal spelt out."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, as text that may be shown."""
        return visible(super().format(record))


def _spelt(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _escaped(found: re.Match[str]) -> str:
    number = ord(found[0])
    if number < 0x10000:
        return f"\\u{number:04x}"
    return f"\\u{0xD800 + (number - 0x10000 >> 10):04x}\\u{0xDC00 + (number & 0x3FF):04x}"
