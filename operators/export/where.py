"""A small language for rows: `reward > 0.5 and task in ('gcd', 'sums') and not error is null`.

Names are columns; values are numbers, 'texts', true, false. Comparisons are = == != < <= > >= and ~ (a regular
expression found somewhere in the text), `in (...)`, `is null`, `is not null`; they are joined by and, or, not and
parentheses. A time is compared with a text like '2026-01-31T12:00'. What is null is neither equal nor unequal.
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
_WORDS = {"and", "or", "not", "in", "is", "null", "true", "false"}
_MAX_DEPTH = 50


class WhereError(ValueError):
    """A condition that cannot be understood: where, and what would do."""


@dataclass(frozen=True)
class Where:
    """A condition on the rows of a table."""

    text: str
    columns: frozenset[str]
    test: Test

    def rows(self, table: pa.Table) -> pa.Table:
        """Those rows of `table` for which it holds."""
        return table.filter(self.test(table), null_selection_behavior="drop")


def parse_where(text: str, schema: pa.Schema) -> Where:
    """The condition `text` on rows of `schema`. Raises WhereError."""
    parser = _Parser(text, schema)
    test = parser.either(0)
    if parser.at < len(parser.tokens):
        raise parser.wrong("what follows is too much; join conditions with and, or")
    return Where(text, frozenset(parser.columns), test)


class _Parser:
    def __init__(self, text: str, schema: pa.Schema) -> None:
        self.text, self.schema = text, schema
        self.tokens: list[tuple[str, str, int]] = []
        self.columns: set[str] = set()
        self.at = 0
        place, end = 0, len(text.rstrip())
        while place < end:
            found = _TOKEN.match(text, place)
            if found is None:
                raise WhereError(f"--where {text!r}: {text[place:].lstrip()[:20]!r} is not understood")
            self.tokens.append((str(found.lastgroup), found[found.lastgroup or 0], found.start()))
            place = found.end()
        if not self.tokens:
            raise WhereError("--where is empty: give a condition, like reward > 0.5")

    def wrong(self, why: str) -> WhereError:
        here = self.text[self.tokens[self.at][2] :].lstrip()[:20] if self.at < len(self.tokens) else "the end"
        return WhereError(f"--where {self.text!r}: at {here!r}: {why}")

    def peek(self, *words: str) -> bool:
        return self.at < len(self.tokens) and self.tokens[self.at][1] in words and self.tokens[self.at][0] != "text"

    def take(self, *words: str) -> bool:
        found = self.peek(*words)
        self.at += found
        return found

    def need(self, word: str) -> None:
        if not self.take(word):
            raise self.wrong(f"expected {word!r}")

    def either(self, depth: int) -> Test:
        left = self.both(depth)
        while self.take("or"):
            left = _joined(pc.or_kleene, left, self.both(depth))
        return left

    def both(self, depth: int) -> Test:
        left = self.one(depth)
        while self.take("and"):
            left = _joined(pc.and_kleene, left, self.one(depth))
        return left

    def one(self, depth: int) -> Test:
        if depth > _MAX_DEPTH:
            raise self.wrong("too many parentheses")
        if self.take("not"):
            inner = self.one(depth + 1)
            return lambda table: pc.invert(inner(table))
        if self.take("("):
            inside = self.either(depth + 1)
            self.need(")")
            return inside
        return self.comparison()

    def comparison(self) -> Test:
        column = self.name()
        kind = self.schema.field(column).type
        if self.take("is"):
            wanted = not self.take("not")
            self.need("null")
            return lambda table: pc.equal(pc.is_null(table[column]), wanted)
        if pa.types.is_nested(kind):
            self.at -= 1
            raise self.wrong(f"{column} is a list; only `is null` can be asked of it")
        if self.take("~"):
            return self.found(column, kind)
        if self.take("in"):
            self.need("(")
            values = [self.value(column, kind)]
            while self.take(","):
                values.append(self.value(column, kind))
            self.need(")")
            known = pa.array(values, kind)
            return lambda table: pc.is_in(table[column], value_set=known)
        if self.peek(*_COMPARE):
            compare = _COMPARE[self.tokens[self.at][1]]
            self.at += 1
            value = pa.scalar(self.value(column, kind), kind)
            return lambda table: compare(table[column], value)
        if pa.types.is_boolean(kind):
            return lambda table: table[column]
        raise self.wrong(f"expected a comparison of {column}, like {column} = ...")

    def name(self) -> str:
        kind, word, _ = self.tokens[self.at] if self.at < len(self.tokens) else ("", "", 0)
        if kind != "name" or word in _WORDS:
            raise self.wrong("expected the name of a column")
        if word not in self.schema.names:
            close = difflib.get_close_matches(word, self.schema.names, n=1, cutoff=0.5)
            near = f"the nearest is {close[0]}" if close else f"there are {', '.join(self.schema.names)}"
            raise self.wrong(f"there is no column {word}; {near}")
        self.at += 1
        self.columns.add(word)
        return word

    def value(self, column: str, kind: pa.DataType) -> Any:
        what, word, _ = self.tokens[self.at] if self.at < len(self.tokens) else ("", "", 0)
        try:
            value = _value(what, word, kind)
        except ValueError:
            wanted = "a time like '2026-01-31T12:00'" if pa.types.is_timestamp(kind) else f"a value of type {kind}"
            raise self.wrong(f"{column} is compared with {wanted}") from None
        self.at += 1
        return value

    def found(self, column: str, kind: pa.DataType) -> Test:
        if not pa.types.is_string(kind):
            raise self.wrong(f"{column} is no text")
        pattern = self.value(column, kind)
        try:
            pc.match_substring_regex(pa.array([""]), pattern)
        except pa.ArrowInvalid as error:
            self.at -= 1
            raise self.wrong(f"no regular expression: {error}") from None
        return lambda table: pc.match_substring_regex(table[column], pattern)


def _joined(how: Callable[[Any, Any], Any], left: Test, right: Test) -> Test:
    return lambda table: how(left(table), right(table))


def _value(what: str, word: str, kind: pa.DataType) -> Any:
    """The value that a token gives for a column of type `kind`. Raises ValueError where it gives none."""
    if pa.types.is_boolean(kind) and word in ("true", "false") and what == "name":
        return word == "true"
    if what == "text":
        text = re.sub(r"\\(.)", r"\1", word[1:-1]) if "\\'" in word or '\\"' in word else word[1:-1]
        if pa.types.is_timestamp(kind):
            moment = datetime.fromisoformat(text)
            return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        if pa.types.is_string(kind):
            return text
    if what == "number" and pa.types.is_floating(kind):
        return float(word)
    if what == "number" and pa.types.is_integer(kind):
        number = float(word)
        if number.is_integer() and abs(number) < 2**62:
            return int(word) if word.lstrip("-").isdigit() else int(number)
    raise ValueError(word)
