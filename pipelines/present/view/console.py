"""Rich consoles that escape control characters in text: only Rich's own styles control the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from infra.escaping import escape_control_characters


class EscapingConsole(Console):
    """A Rich console that escapes the control characters of the text that it prints.

    `discard_if_closed`: once the reader of its pipe has closed it, it prints to nobody; otherwise it raises
    BrokenPipeError.
    """

    def __init__(self, *, discard_if_closed: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._discard_if_closed = discard_if_closed

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, or discard all later output of the process; Rich would end it with exit code 1."""
        if not self._discard_if_closed:
            raise BrokenPipeError("the reader of the output has closed the pipe")
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, self.file.fileno())
        os.close(devnull)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return the segments of `renderable` with escaped text."""
        for each in super().render(renderable, options):
            yield each if each.control else Segment(escape_control_characters(each.text), each.style)


def console(**options: Any) -> EscapingConsole:
    """Return a console for text for people, with Rich's `options`."""
    return EscapingConsole(emoji=False, **options)
