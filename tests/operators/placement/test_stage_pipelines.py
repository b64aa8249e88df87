from __future__ import annotations

import pytest

from infra.store.model_parts import HeldParts
from operators.placement.stage_groups import plan_pipeline, plan_pipelines


def held(text: str) -> HeldParts:
    """Parts as text: "e" are the tensors outside of layers, "2-4" layers 2, 3 and 4."""
    ends, layers = False, set()
    for part in text.split():
        if part == "e":
            ends = True
        else:
            first, _, last = part.partition("-")
            layers |= set(range(int(first), int(last or first) + 1))
    return HeldParts(ends, frozenset(layers))


def text(pipelines: list) -> list[str]:
    return [" ".join(f"{stage.replica}:{stage.first}-{stage.end}" for stage in pipeline) for pipeline in pipelines]


@pytest.mark.parametrize(
    ("holdings", "layers", "expected"),
    [
        pytest.param({}, 4, [], id="nobody"),
        pytest.param({0: "e 0-2", 1: "0-2"}, 4, [], id="a layer is missing"),
        pytest.param({0: "0-3", 1: "0-3"}, 4, [], id="nobody has the ends"),
        pytest.param({0: "e 0-1", 1: "2-3"}, 4, ["0:0-2 1:2-4"], id="halves"),
        pytest.param({0: "e 0-2", 1: "3-5", 2: "6-8", 3: "9-11"}, 12, ["0:0-3 1:3-6 2:6-9 3:9-12"], id="quarters"),
        pytest.param({0: "2-3", 1: "e 0-1"}, 4, ["1:0-2 0:2-4"], id="the one with the ends leads"),
        pytest.param({0: "e 0-1", 1: "e 0-1", 2: "2-3", 3: "2-3"}, 4, ["0:0-2 2:2-4", "1:0-2 3:2-4"], id="two"),
        pytest.param({0: "e 0-4", 1: "2-6"}, 7, ["0:0-3 1:3-7"], id="layers do not divide"),
        pytest.param({0: "e 0-6", 1: "1-7"}, 8, ["0:0-4 1:4-8"], id="as even as the parts allow"),
        pytest.param({0: "e", 1: "0-3", 2: "4-7"}, 8, ["0:0-0 1:0-4 2:4-8"], id="a leader without layers"),
        pytest.param({0: "e 0-3", 1: "e 0", 2: "1-3"}, 4, ["0:0-4", "1:0-1 2:1-4"], id="one has everything"),
    ],
)
def test_pipelines_cover_the_model_with_even_stages(holdings: dict[int, str], layers: int, expected: list[str]) -> None:
    assert text(plan_pipelines({replica: held(parts) for replica, parts in holdings.items()}, layers)) == expected


def test_pipeline_keeps_the_leader_that_has_the_requests() -> None:
    holdings = {0: held("e 0-3"), 1: held("e 0-1"), 2: held("2-3")}
    assert text([plan_pipeline(holdings, 4, leader=1)]) == ["1:0-2 0:2-4"]
    assert plan_pipeline({0: held("e 0-3"), 1: held("0-1")}, 4, leader=1) is None
