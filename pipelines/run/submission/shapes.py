"""Shapes of a drawing as SVG text: boxes with lines of text, and arrows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

LINE = 15
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1d1d1f}.small{font-size:11px;fill:#6e6e73}"
    ".topic{fill:#eef4ff;stroke:#4f7cd1}.step{fill:#fff;stroke:#1d1d1f}.map{fill:#fff6e5;stroke:#b87400}"
    ".edge{stroke:#6e6e73;fill:none}.repack{stroke:#b87400;fill:none;stroke-width:2}.page{fill:#fff}"
)
_ARROW = (
    '<marker id="to" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8"'
    ' orient="auto" markerUnits="userSpaceOnUse">'
    '<path d="M0 0L8 4L0 8z" fill="#6e6e73"/></marker>'
)


@dataclass(frozen=True)
class Box:
    """A rectangle of class `kind` with its upper left corner at (x, y): a name, and smaller lines below it."""

    x: int
    y: int
    width: int
    name: str
    lines: tuple[str, ...] = ()
    kind: str = "step"

    @property
    def height(self) -> int:
        return 25 + LINE * len(self.lines)

    @property
    def right(self) -> int:
        return self.x + self.width

    @property
    def bottom(self) -> int:
        return self.y + self.height

    @property
    def middle(self) -> int:
        return self.y + self.height // 2

    @property
    def centre(self) -> int:
        return self.x + self.width // 2

    def svg(self) -> str:
        """The rectangle and its text, which is shortened to the width."""
        shape = f'x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="6"'
        parts = [f'<rect class="{self.kind}" {shape}/>']
        parts.append(text(self.x + 10, self.y + 17, _short(self.name, self.width // 8)))
        for number, line in enumerate(self.lines, 1):
            parts.append(text(self.x + 10, self.y + 17 + number * LINE, _short(line, self.width // 6), small=True))
        return "".join(parts)


def text(x: int, y: int, content: str, *, small: bool = False) -> str:
    """A line of text that begins at (x, y)."""
    kind = "small" if small else "name"
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(content)}</text>'


def arrow(*points: tuple[int, int], kind: str = "edge") -> str:
    """An arrow along `points`."""
    path = "L".join(f"{x} {y}" for x, y in points)
    return f'<path class="{kind}" marker-end="url(#to)" d="M{path}"/>'


def document(title: str, width: int, height: int, parts: Iterable[str]) -> str:
    """The SVG document of `parts`."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f"<title>{escape(title)}</title><style>{_STYLE}</style><defs>{_ARROW}</defs>"
    page = f'<rect class="page" width="{width}" height="{height}"/>'
    body = "\n".join([page, *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{head}\n{body}\n</svg>\n'


def stack(boxes: Sequence[Box], height: int, gap: int) -> list[Box]:
    """`boxes` one below the other, centred in `height`."""
    top = (height - sum(box.height for box in boxes) - gap * (len(boxes) - 1)) // 2
    placed = []
    for box in boxes:
        placed.append(replace(box, y=top))
        top += box.height + gap
    return placed


def _short(content: str, length: int) -> str:
    half = length // 2 - 1
    return content if len(content) <= length else f"{content[:half]}…{content[-half:]}"
