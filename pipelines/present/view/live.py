"""The live view of a run: redrawn in place on a terminal, otherwise printed as a line at intervals."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from infra.terminal import wrapped
from pipelines.inspect.run_state.state import RunState, new_run
from pipelines.present.view.panels import screen
from pipelines.present.view.text import current_warnings, phase_name, run_line

REDRAW_S = 0.5
"""Kept low because a redraw takes a few milliseconds of CPU time that the run needs."""
LINE_S = 10.0


class LiveView:
    """Shows the states of `run`; `goal` is its number of optimizer steps. `update` may be called at any rate."""

    def __init__(
        self,
        console: Console,
        run: str,
        goal: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        line_every_s: float = LINE_S,
    ) -> None:
        self._console, self._clock = console, clock
        self._interval = REDRAW_S if console.is_terminal else line_every_s
        self._state = new_run(run, goal, 0)
        self._shown: RunState | None = None
        self._shown_at = -float("inf")
        self._live: Live | None = None
        self._line = ""
        self._warned: frozenset[str] = frozenset()

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown is not self._state and (self._live is not None or _content(run_line(self._state)) != self._line):
            self._show()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, state: RunState) -> None:
        """Show `state` if it is new and the redraw interval has passed; show what `_shown_at_once` has at once."""
        self._state = state
        due = self._clock() - self._shown_at >= self._interval
        changed = self._shown is None or _shown_at_once(state) != _shown_at_once(self._shown)
        if (due or changed) and state is not self._shown:
            self._show()

    def note(self, line: str) -> None:
        """Print a permanent line, such as a role's restart or an error, wrapped on a terminal."""
        columns = self._console.width if self._console.is_terminal else None
        self._console.print(Text(wrapped(line, columns)), soft_wrap=True)

    def _show(self) -> None:
        state = self._state
        if self._live is not None:
            size, ascii_only = self._console.size, self._console.options.ascii_only
            self._live.update(screen(state, size.width, size.height - 1, ascii_only=ascii_only), refresh=True)
        elif state.started_at:
            if self._shown is None or self._shown.phase != state.phase:
                self.note(f"-- {phase_name(state.phase)}")
            self._note_warnings(state)
            line = run_line(state)
            self.note(line)
            self._line = _content(line)
        self._shown, self._shown_at = state, self._clock()

    def _note_warnings(self, state: RunState) -> None:
        """Print each warning once when it begins, and its sign when it ends."""
        warnings = current_warnings(state)
        for sign, text in warnings.items():
            if sign not in self._warned:
                self.note(f"warning: {text}")
        for sign in sorted(self._warned - {*warnings}):
            self.note(f"warning ended at step {state.step}: {sign}")
        self._warned = frozenset(warnings)


def _shown_at_once(state: RunState) -> tuple[object, ...]:
    """The parts of `state` whose changes the view shows at once: the phase, its check, a pause."""
    return state.phase, state.check if state.phase == "checks" else None, state.paused_since


def _content(line: str) -> str:
    """A line of the run's state without its time."""
    return line.partition("] ")[2]
