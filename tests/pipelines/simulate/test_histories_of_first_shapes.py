"""More histories of the first half of the shapes. Two files, so that two processes play them."""

from __future__ import annotations

import pytest
from clean_histories import HALF, more_seeds, play_clean, quiet

from pipelines.simulate.configurations import SHAPES

__all__ = ["quiet"]


@pytest.mark.parametrize("shape", list(SHAPES)[:HALF])
def test_more_histories_violate_no_invariant(shape: str) -> None:
    play_clean(shape, more_seeds(shape))
