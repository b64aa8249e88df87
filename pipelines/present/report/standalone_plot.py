"""A plot as an SVG document of its own: with colours, title, background and legend, which a page otherwise has."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

COLOURS = ("#0b6bcb", "#b87400", "#2e7d32")
STYLE = (
    "text{font:11px sans-serif;fill:#5b5b60}.level-label{fill:#1d1d1f}.grid{stroke:#e3e3e6}.axis{stroke:#8a8a8f}"
    ".level{stroke:#1d1d1f;stroke-dasharray:5 4;opacity:.7}polyline{fill:none;stroke-width:2}"
    + "".join(f"polyline.c{at}{{stroke:{colour}}}circle.c{at}{{fill:{colour}}}" for at, colour in enumerate(COLOURS))
    + ".page{fill:#fff}"
)


def standalone(plot: str, title: str, labels: Sequence[str]) -> str:
    """The SVG element in `plot` as a document; `labels` are those of its colours, in order."""
    head, _, content = plot[: plot.index("</svg>")].partition(">")
    keys = "".join(
        f'<circle class="c{at}" cx="{70 + 210 * at}" cy="194" r="4"/>'
        f'<text x="{80 + 210 * at}" y="198">{escape(label)}</text>'
        for at, label in enumerate(labels)
    )
    page = '<rect class="page" width="100%" height="100%"/>'
    about = f"<title>{escape(title)}</title>"
    return f'{head} xmlns="http://www.w3.org/2000/svg">{about}<style>{STYLE}</style>{page}{content}{keys}</svg>\n'
