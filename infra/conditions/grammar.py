"""The condition language: `reward > 0.5 and task in ('gcd', 'sums') and not error is null`.

Names are columns, with dots for the fields of a struct, in `backticks` where they have other characters. Values are
numbers, 'texts', true and false. The comparisons are = == != < <= > >=, ~ (the text contains a match of a regular
expression, in RE2's syntax), `in (...)`, `is null` and `is not null`; a column alone is true. `and`, `or`, `not` and
parentheses combine them. A comparison with null is null, as in SQL, and a condition selects rows where it is true.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

Value = str | int | float | bool
_MAX_SHOWN = 200
"""Characters of a condition that its error shows."""


class ConditionError(ValueError):
    """An invalid condition. The message has the position and what is expected there."""

    def __init__(self, text: str, at: int, why: str) -> None:
        shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
        super().__init__(f"condition {shown!r}: at {text[at:].lstrip()[:20] or 'the end'!r}: {why}")


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of `column` with `values`: several for `in`, none for `is null`. `at` is its place in the text."""

    column: str
    operator: str
    values: tuple[Value, ...]
    at: int


@dataclass(frozen=True, slots=True)
class Combination:
    """Conditions combined by `and` or `or`, or the negation of one by `not`."""

    operator: str
    parts: tuple[Condition, ...]


Condition = Comparison | Combination


@lru_cache(maxsize=256)
def parse_condition(text: str) -> Condition:
    """The condition in `text`. Raises ConditionError."""
    from pyparsing import ParseBaseException

    if not text.strip():
        raise ConditionError(text, 0, "it is empty: give a condition, such as reward > 0.5")
    try:
        return _grammar().parse_string(text)[0]
    except ParseBaseException as error:
        raise ConditionError(text, error.loc, error.msg[:1].lower() + error.msg[1:]) from None
    except RecursionError:
        raise ConditionError(text, 0, "too many parentheses") from None


def comparisons(condition: Condition) -> Iterator[Comparison]:
    """The comparisons in `condition`, in their order."""
    if isinstance(condition, Comparison):
        yield condition
    else:
        for part in condition.parts:
            yield from comparisons(part)


@cache
def _grammar() -> Any:
    # Imported on first use: the configuration imports this module, and most runs have no condition.
    from pyparsing import DelimitedList, Empty, Forward, Keyword, Literal, QuotedString, Regex, StringEnd, one_of

    def word(text: str) -> Any:
        return Keyword(text).suppress()

    opening, closing = Literal("(").suppress(), Literal(")").suppress()
    reserved = one_of("and or not in is null true false", as_keyword=True)
    column = (~reserved + Regex(r"[^\W\d]\w*(\.\w+)*") | QuotedString("`")).set_name("the name of a column")
    number = Regex(r"-?\d+(\.\d*)?([eE][+-]?\d+)?").set_parse_action(lambda found: _number(found[0]))
    text = Regex(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"").set_parse_action(lambda found: _unquoted(found[0]))
    boolean = one_of("true false", as_keyword=True).set_parse_action(lambda found: found[0] == "true")
    value = (number | text | boolean).set_name("a number, a 'text', true or false")

    null = Keyword("null").set_parse_action(lambda: ("is null", ()))
    not_null = (word("not") - word("null")).set_parse_action(lambda: ("is not null", ()))
    # Each ending of a comparison is a pair of its operator and its values.
    sign = one_of("= == != < <= > >= ~").set_parse_action(lambda found: found[0].replace("==", "="))
    ending = (
        (sign - value).set_parse_action(lambda found: (found[0], (found[1],)))
        | (word("in") - opening - DelimitedList(value) - closing).set_parse_action(lambda found: ("in", tuple(found)))
        | (word("is") - (null | not_null).set_name("`null` or `not null`"))
        | Empty().set_parse_action(lambda: ("=", (True,)))
    )
    comparison = (column + ending).set_parse_action(lambda _, at, found: _comparison(at, *found))

    condition, simple = Forward(), Forward()
    negation = (word("not") - simple).set_parse_action(lambda found: Combination("not", tuple(found)))
    simple <<= (negation | opening - condition - closing | comparison).set_name("a comparison, such as reward > 0.5")
    every = (simple + (word("and") - simple)[...]).set_parse_action(lambda found: _combined("and", tuple(found)))
    condition <<= (every + (word("or") - every)[...]).set_parse_action(lambda found: _combined("or", tuple(found)))
    whole = condition + StringEnd().set_name("the end, or `and` or `or` to combine conditions")
    return whole.streamline()  # now, since parsers may run in several threads


def _comparison(at: int, column: str, ending: tuple[str, tuple[Value, ...]]) -> Comparison:
    return Comparison(column, *ending, at)


def _combined(operator: str, parts: tuple[Condition, ...]) -> Condition:
    return parts[0] if len(parts) == 1 else Combination(operator, parts)


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdigit() and len(text) < 20 else float(text)


def _unquoted(text: str) -> str:
    return re.sub(r"\\(['\"])", r"\1", text[1:-1])
