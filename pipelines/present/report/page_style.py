"""The head of a page: the style sheet of reports, for light and dark mode, without external resources."""

POLICY = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'\">"
)
"""The page has no script and loads nothing; this policy makes the browser reject both."""
STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1c2430; --soft: #5b6675; --edge: #e1e5ea; --grid: #e9ecf0;
  --good: #1a7f4b; --bad: #c0362c; --s0: #2563c9; --s1: #d9730d; --s2: #1f8a5f; --s3: #8b4fd0; --s4: #c2408a;
  --s5: #0e8fa3; --s6: #8a7a1c; --s7: #6b7280;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1a2029; --ink: #e4e8ee; --soft: #98a3b3; --edge: #2b333f; --grid: #28303b;
    --good: #4cc38a; --bad: #f0776c; --s0: #6ea3f7; --s1: #f0a04b; --s2: #4cc38a; --s3: #b98af0; --s4: #ec7fb8;
    --s5: #4cc0d4; --s6: #c9b74a; --s7: #9ca3af;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 12px; }
h3 { font-size: 15px; margin: 0 0 6px; }
.sub, .note, .nothing { color: var(--soft); }
.sub { margin: 4px 0 20px; }
.note { font-size: 13px; margin: 6px 0 0; }
.nothing { padding: 40px 0; text-align: center; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(max(150px, 22%), 1fr)); gap: 12px; }
.tile, .card { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; }
.tile { padding: 12px 14px; }
.tile b { display: block; font-size: 21px; font-weight: 650; white-space: nowrap; }
.tile span { color: var(--soft); font-size: 13px; }
.good { color: var(--good); } .bad { color: var(--bad); }
.card { padding: 16px 18px; min-width: 0; }
.card p { margin: 0 0 8px; } .card p:last-child { margin-bottom: 0; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 16px; }
.wide { margin-top: 16px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 11px; }
svg text.label { font-size: 12px; }
svg text.level-label { fill: var(--ink); }
svg text.on { fill: var(--card); font-size: 12px; font-weight: 600; }
svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--soft); }
svg .level { stroke: var(--ink); stroke-dasharray: 5 4; opacity: .7; }
svg polyline { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg .faint { opacity: .28; stroke-width: 1.2; }
polyline.c0 { stroke: var(--s0); } circle.c0, rect.c0 { fill: var(--s0); } i.c0 { background: var(--s0); }
polyline.c1 { stroke: var(--s1); } circle.c1, rect.c1 { fill: var(--s1); } i.c1 { background: var(--s1); }
polyline.c2 { stroke: var(--s2); } circle.c2, rect.c2 { fill: var(--s2); } i.c2 { background: var(--s2); }
polyline.c3 { stroke: var(--s3); } circle.c3, rect.c3 { fill: var(--s3); } i.c3 { background: var(--s3); }
polyline.c4 { stroke: var(--s4); } circle.c4, rect.c4 { fill: var(--s4); } i.c4 { background: var(--s4); }
polyline.c5 { stroke: var(--s5); } circle.c5, rect.c5 { fill: var(--s5); } i.c5 { background: var(--s5); }
polyline.c6 { stroke: var(--s6); } circle.c6, rect.c6 { fill: var(--s6); } i.c6 { background: var(--s6); }
polyline.c7 { stroke: var(--s7); } circle.c7, rect.c7 { fill: var(--s7); } i.c7 { background: var(--s7); }
.legend { margin: 6px 0 0; font-size: 13px; color: var(--soft); }
.key { display: inline-block; margin-right: 16px; white-space: nowrap; }
.key i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.tables { display: grid; gap: 16px; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
td { padding: 4px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td:first-child { color: var(--soft); padding-right: 16px; }
td:last-child { text-align: right; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
pre { margin: 0; overflow-x: auto; font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
pre.sample { white-space: pre-wrap; overflow-wrap: anywhere; }
span.p0 { color: var(--good); } span.p1 { color: var(--s6); } span.p2 { color: var(--s1); }
span.p3, span.p4, span.p5 { color: var(--bad); } span.p4 { font-weight: 600; }
span.p5 { font-weight: 600; text-decoration: underline; }
i.p0 { background: var(--good); } i.p1 { background: var(--s6); } i.p2 { background: var(--s1); }
i.p3, i.p4, i.p5 { background: var(--bad); }
summary { cursor: pointer; color: var(--soft); }
details pre { margin-top: 10px; }
"""


def head(title: str) -> str:
    """Return the beginning of a page up to its content; `title` is escaped already."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{POLICY}\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title} · Laminar</title><style>{STYLE}</style></head><body><main>"
    )
