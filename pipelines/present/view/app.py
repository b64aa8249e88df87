"""`laminar watch` on a terminal: a Textual application that shows `panels.screen`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar

from rich.table import Table
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static, TabbedContent, TabPane

from pipelines.inspect.run_state.state import RunState
from pipelines.present.view.console import EscapedText
from pipelines.present.view.panels import screen
from pipelines.present.view.text import UNKNOWN, count, percent

REDRAW_S = 0.5


class WatchApp(App[None]):
    """Shows the states that `tick` returns. A thread calls `tick`, because a broker may respond slowly."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "pause", "Pause"),
        Binding("1", "tab('run')", "Run"),
        Binding("2", "tab('replicas')", "Replicas"),
    ]

    def __init__(self, run: str, tick: Callable[[], RunState]) -> None:
        super().__init__()
        self.title = f"laminar {run}"
        self._tick, self._paused, self._ended = tick, False, threading.Event()

    def compose(self) -> ComposeResult:
        """Create two tabs and the footer with the keys."""
        with TabbedContent(initial="run"):
            with TabPane("Run", id="run"):
                yield Static(id="screen")
            with TabPane("Replicas", id="replicas"), VerticalScroll():
                yield Static(id="table")
        yield Footer()

    def on_mount(self) -> None:
        """Start the thread that calls `tick`."""
        self.run_worker(self._follow, thread=True)

    def on_unmount(self) -> None:
        """Stop that thread."""
        self._ended.set()

    def show(self, state: RunState) -> None:
        """Draw `state`."""
        if not self._paused:
            self.query_one("#screen", Static).update(
                EscapedText(screen(state, self.size.width - 4, self.size.height - 4))
            )
            self.query_one("#table", Static).update(EscapedText(replica_table(state)))

    def action_pause(self) -> None:
        """Pause or resume redrawing."""
        self._paused = not self._paused

    def action_tab(self, name: str) -> None:
        """Show the tab `name`."""
        self.query_one(TabbedContent).active = name

    def _follow(self) -> None:
        while not self._ended.is_set():
            state = self._tick()
            if self._ended.is_set():
                return
            self.call_from_thread(self.show, state)
            self._ended.wait(REDRAW_S)


def replica_table(state: RunState) -> Table:
    """Return a row for each replica: state, version, load, KV use, tokens, and age of its heartbeat."""
    table = Table(box=None, header_style="bold")
    for name in ("replica", "state", "version", "running", "waiting", "KV", "tokens", "heartbeat"):
        table.add_column(name, justify="left" if name in ("state", "version") else "right")
    for number, each in sorted(state.replicas.items()):
        kv = percent(each.kv_used / each.kv_capacity) if each.kv_capacity else UNKNOWN
        age = f"{max(0, state.now - each.sent_at) / 1000:.0f} s"
        version = str(each.policy_version or UNKNOWN)
        load = (str(each.running), str(each.waiting), kv, count(each.tokens_generated), age)
        table.add_row(str(number), each.state, version, *load)
    return table
