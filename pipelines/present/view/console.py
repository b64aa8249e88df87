"""Consoles on which only their own styles steer the terminal: text is made visible before it is laid out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

from infra.escaping import escape_control_characters


class VisibleConsole(Console):
    """A Rich console that writes no control character of the text that it is given."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of `renderable`, each with visible text."""
        return _visible(super().render(renderable, options))


class Visible:
    """`renderable` for a console of somebody else's, such as Textual's."""

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Its segments, each with visible text."""
        return _visible(console.render(self._renderable, options))


def console(**options: Any) -> VisibleConsole:
    """A console for what people read, with Rich's `options`."""
    return VisibleConsole(emoji=False, **options)


def _visible(segments: Iterable[Segment]) -> Iterable[Segment]:
    return (each if each.control else Segment(escape_control_characters(each.text), each.style) for each in segments)
