"""The condition language of `--where`: `reward > 0.5 and task in ('gcd', 'sums') and not error is null`.

Names are columns; values are numbers, 'texts', true and false. The comparisons are = == != < <= > >=, ~ (the text
contains a match of a regular expression), `in (...)`, `is null` and `is not null`; and, or, not and parentheses combine
them. A time is compared with a text such as '2026-01-31T12:00'. A comparison with null is null, as in SQL.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

Test = Callable[[pa.Table], Any]

_TOKEN = re.compile(
    r"\s*(?:(?P<number>-?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<sign>==|!=|<=|>=|[=<>~(),]))"
)
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_KEYWORDS = {"and", "or", "not", "in", "is", "null", "true", "false"}
_MAX_DEPTH = 50


class WhereError(ValueError):
    """An invalid condition. The message has the position and what is expected there."""


@dataclass(frozen=True)
class Where:
    """A condition on the rows of a table."""

    text: str
    columns: frozenset[str]
    test: Test

    def rows(self, table: pa.Table) -> pa.Table:
        """The rows of `table` for which the condition holds."""
        return table.filter(self.test(table), null_selection_behavior="drop")


def parse_where(text: str, schema: pa.Schema) -> Where:
    """Parse the condition `text` on rows of `schema`. Raises WhereError."""
    parser = _Parser(text, schema)
    test = parser.or_expression(0)
    if parser.at < len(parser.tokens):
        raise parser.error("the condition ends here; combine conditions with and, or")
    return Where(text, frozenset(parser.columns), test)


class _Parser:
    def __init__(self, text: str, schema: pa.Schema) -> None:
        self.text, self.schema = text, schema
        self.tokens: list[tuple[str, str, int]] = []
        self.columns: set[str] = set()
        self.at = 0
        place, end = 0, len(text.rstrip())
        while place < end:
            match = _TOKEN.match(text, place)
            if match is None:
                raise WhereError(f"--where {text!r}: {text[place:].lstrip()[:20]!r} is not valid here")
            self.tokens.append((str(match.lastgroup), match[match.lastgroup or 0], match.start()))
            place = match.end()
        if not self.tokens:
            raise WhereError("--where is empty: give a condition, such as reward > 0.5")

    def error(self, why: str) -> WhereError:
        here = self.text[self.tokens[self.at][2] :].lstrip()[:20] if self.at < len(self.tokens) else "the end"
        return WhereError(f"--where {self.text!r}: at {here!r}: {why}")

    def next_is(self, *words: str) -> bool:
        return self.at < len(self.tokens) and self.tokens[self.at][1] in words and self.tokens[self.at][0] != "text"

    def accept(self, *words: str) -> bool:
        accepted = self.next_is(*words)
        self.at += accepted
        return accepted

    def expect(self, word: str) -> None:
        if not self.accept(word):
            raise self.error(f"expected {word!r}")

    def or_expression(self, depth: int) -> Test:
        left = self.and_expression(depth)
        while self.accept("or"):
            left = _combined(pc.or_kleene, left, self.and_expression(depth))
        return left

    def and_expression(self, depth: int) -> Test:
        left = self.not_expression(depth)
        while self.accept("and"):
            left = _combined(pc.and_kleene, left, self.not_expression(depth))
        return left

    def not_expression(self, depth: int) -> Test:
        if depth > _MAX_DEPTH:
            raise self.error("too many parentheses")
        if self.accept("not"):
            inner = self.not_expression(depth + 1)
            return lambda table: pc.invert(inner(table))
        if self.accept("("):
            inside = self.or_expression(depth + 1)
            self.expect(")")
            return inside
        return self.comparison()

    def comparison(self) -> Test:
        column = self.name()
        kind = self.schema.field(column).type
        if self.accept("is"):
            wanted = not self.accept("not")
            self.expect("null")
            return lambda table: pc.equal(pc.is_null(table[column]), wanted)
        if pa.types.is_nested(kind):
            self.at -= 1
            raise self.error(f"{column} is a list, for which only `is null` and `is not null` are allowed")
        if self.accept("~"):
            return self.regex_match(column, kind)
        if self.accept("in"):
            self.expect("(")
            values = [self.value(column, kind)]
            while self.accept(","):
                values.append(self.value(column, kind))
            self.expect(")")
            known = pa.array(values, kind)
            return lambda table: pc.is_in(table[column], value_set=known)
        if self.next_is(*_COMPARE):
            compare = _COMPARE[self.tokens[self.at][1]]
            self.at += 1
            value = pa.scalar(self.value(column, kind), kind)
            return lambda table: compare(table[column], value)
        if pa.types.is_boolean(kind):
            return lambda table: table[column]
        raise self.error(f"expected a comparison of {column}, such as {column} = ...")

    def name(self) -> str:
        kind, word, _ = self.tokens[self.at] if self.at < len(self.tokens) else ("", "", 0)
        if kind != "name" or word in _KEYWORDS:
            raise self.error("expected the name of a column")
        if word not in self.schema.names:
            close = difflib.get_close_matches(word, self.schema.names, n=1, cutoff=0.5)
            near = f"the nearest is {close[0]}" if close else f"there are {', '.join(self.schema.names)}"
            raise self.error(f"there is no column {word}; {near}")
        self.at += 1
        self.columns.add(word)
        return word

    def value(self, column: str, kind: pa.DataType) -> Any:
        what, word, _ = self.tokens[self.at] if self.at < len(self.tokens) else ("", "", 0)
        try:
            value = _value(what, word, kind)
        except ValueError:
            wanted = "a time such as '2026-01-31T12:00'" if pa.types.is_timestamp(kind) else f"a value of type {kind}"
            raise self.error(f"{column} must be compared with {wanted}") from None
        self.at += 1
        return value

    def regex_match(self, column: str, kind: pa.DataType) -> Test:
        if not pa.types.is_string(kind):
            raise self.error(f"{column} is not a text column")
        pattern = self.value(column, kind)
        try:
            pc.match_substring_regex(pa.array([""]), pattern)
        except pa.ArrowInvalid as error:
            self.at -= 1
            raise self.error(f"not a regular expression: {error}") from None
        return lambda table: pc.match_substring_regex(table[column], pattern)


def _combined(how: Callable[[Any, Any], Any], left: Test, right: Test) -> Test:
    return lambda table: how(left(table), right(table))


def _value(what: str, word: str, kind: pa.DataType) -> Any:
    """The value of a token for a column of type `kind`. Raises ValueError if the token has another type."""
    if pa.types.is_boolean(kind) and word in ("true", "false") and what == "name":
        return word == "true"
    if what == "text":
        text = re.sub(r"\\(.)", r"\1", word[1:-1]) if "\\'" in word or '\\"' in word else word[1:-1]
        if pa.types.is_timestamp(kind):
            time = datetime.fromisoformat(text)
            return time if time.tzinfo else time.replace(tzinfo=UTC)
        if pa.types.is_string(kind):
            return text
    if what == "number" and pa.types.is_floating(kind):
        return float(word)
    if what == "number" and pa.types.is_integer(kind):
        number = float(word)
        if number.is_integer() and abs(number) < 2**62:
            return int(word) if word.lstrip("-").isdigit() else int(number)
    raise ValueError(word)
