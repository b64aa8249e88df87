"""Rich consoles that escape control characters in text: only Rich's own styles control the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from infra.escaping import escape_control_characters


class EscapingConsole(Console):
    """A Rich console that escapes the control characters of the text that it prints."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return the segments of `renderable` with escaped text."""
        for each in super().render(renderable, options):
            yield each if each.control else Segment(escape_control_characters(each.text), each.style)


def console(**options: Any) -> EscapingConsole:
    """Return a console for text for people, with Rich's `options`."""
    return EscapingConsole(emoji=False, **options)
