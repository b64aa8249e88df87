"""Models that share a device: each is there for its turn alone, and the times add up."""

from __future__ import annotations

import logging

import pytest
import torch

from operators.trainer import device_sharing
from operators.trainer.device_sharing import HOST, DeviceTurns

DEVICE = torch.device("meta")


class Clock:
    """Each reading is a second after the one before."""

    now = 100.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    ticking = Clock()
    monkeypatch.setattr(device_sharing, "time", ticking)
    return ticking


def make_turns(moves: list[tuple[str, torch.device]], *offloaded: str) -> DeviceTurns:
    models = {name: lambda device, name=name: moves.append((name, device)) for name in ("policy", "critic")}
    return DeviceTurns(DEVICE, models, offloaded=offloaded)  # type: ignore[arg-type]


def test_offloaded_models_are_on_the_device_for_their_turn() -> None:
    moves: list[tuple[str, torch.device]] = []
    turns = make_turns(moves, "critic")
    assert moves == [("policy", DEVICE), ("critic", HOST)]
    del moves[:]
    with turns.turn("policy"):
        assert moves == []
    with turns.turn("critic"):
        assert moves == [("critic", DEVICE)]
    assert moves == [("critic", DEVICE), ("critic", HOST)]


def test_model_leaves_the_device_after_an_error() -> None:
    moves: list[tuple[str, torch.device]] = []
    turns = make_turns(moves, "policy")
    with pytest.raises(ValueError, match="no memory"), turns.turn("policy"):
        raise ValueError("no memory")
    assert moves[-1] == ("policy", HOST)


def test_times_of_turns_add_up(caplog: pytest.LogCaptureFixture) -> None:
    turns = make_turns([], "critic")
    with caplog.at_level(logging.DEBUG):
        for _ in range(2):
            with turns.turn("critic"), turns.turn("policy"):
                pass
    assert turns.seconds() == {
        "time/critic_load": 2.0,
        "time/critic_use": 6.0,
        "time/critic_offload": 2.0,
        "time/policy_use": 2.0,
    }
    assert turns.seconds() == {}
    assert "critic: use took 3.000 s" in caplog.text
