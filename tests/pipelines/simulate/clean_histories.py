"""Histories that pass: played by several test files at once, each with its digest at seed 0.

    python tests/pipelines/simulate/clean_histories.py

writes the digests again, after a change of the code that changes histories on purpose.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from pipelines.simulate.configurations import SHAPES  # noqa: E402
from pipelines.simulate.explore import draw_history, play, to_json  # noqa: E402

DIGESTS = Path(__file__).parent / "golden/digests.json"
HALF = len(SHAPES) // 2
COSTLY = frozenset(("long answers", "long evaluation", *(shape for shape in SHAPES if "relays" in shape)))
"""Shapes whose histories take one to two seconds."""


def more_seeds(shape: str) -> range:
    """The seeds of a shape, with which `make test` plays more than 200 histories."""
    return range(2, 4 if shape in COSTLY else 11)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Each fault of each history would log a warning."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def play_clean(shape: str, seeds: Iterable[int]) -> None:
    """Play histories of a shape, none of which may fail."""
    for seed in seeds:
        history = play(draw_history(seed, [shape]))
        assert history.failure is None, json.dumps(to_json(history))


def main() -> None:
    logging.disable(logging.CRITICAL)
    found = {shape: play(draw_history(0, [shape])).digest for shape in SHAPES}
    DIGESTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
