"""The runners that pipelines can be tested on here: the embedded one always, Prism where its binary is."""

from __future__ import annotations

from infra.runners.options import Runner
from infra.runners.prism import find_prism

RUNNERS_HERE: tuple[Runner, ...] = ("embedded", "prism") if find_prism() else ("embedded",)
