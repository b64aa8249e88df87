"""Rich consoles that escape control characters in text: only Rich's own styles control the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

from infra.escaping import escape_control_characters


class EscapingConsole(Console):
    """A Rich console that escapes the control characters of the text that it prints."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return the segments of `renderable` with escaped text."""
        return _escaped(super().render(renderable, options))


class EscapedText:
    """Wraps `renderable` with the same escaping for another console, such as Textual's."""

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Return its segments with escaped text."""
        return _escaped(console.render(self._renderable, options))


def console(**options: Any) -> EscapingConsole:
    """Return a console for text for people, with Rich's `options`."""
    return EscapingConsole(emoji=False, **options)


def _escaped(segments: Iterable[Segment]) -> Iterable[Segment]:
    return (each if each.control else Segment(escape_control_characters(each.text), each.style) for each in segments)
