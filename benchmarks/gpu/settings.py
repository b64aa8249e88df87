"""The sizes of one check: the model's shape, and how much each part generates, trains and copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.models import qwen2

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model: the sizes of its Qwen2 config, and the device memory that the check needs with it."""

    name: str
    config: Mapping[str, int | bool]
    memory: int


SHAPES = (
    Shape(name="Qwen2.5-1.5B", config=qwen2(1536, 8960, 28, 12, 151_936), memory=70 * GIB),
    Shape(name="Qwen2.5-0.5B", config=qwen2(896, 4864, 24, 14, 151_936), memory=30 * GIB),
    Shape(name="0.1B", config=qwen2(512, 2048, 8, 8, 32_768), memory=0),
)
"""From large to small."""
TINY = Shape(name="tiny", config=qwen2(64, 128, 2, 4, 512), memory=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the parts measure, by default on a GPU. Times are seconds."""

    device: str
    shape: Shape
    slots: int = 64
    response: int = 256
    """Tokens of every response whose tokens/s are compared."""
    refresh_s: float = 10.0
    repetitions: int = 3
    rounds: int = 16
    """Rounds of generation and training."""
    sequences: int = 64
    """Sequences of a training batch, of `length` tokens, half of them trained."""
    length: int = 512
    micro_batch_tokens: int = 8192
    matrix: int = 8192
    """Rows and columns of the matrices whose product is the roof."""
    copy_bytes: int = GIB
    attention_lengths: tuple[int, ...] = (4096, 2048, 2048, *(512,) * 16)
    gpus: int = 1
    """Ranks of the parts with several."""
    start: str = "fork"
    """How processes are started."""


def settings_for(device: str, memory: int) -> Settings:
    """The settings for `device` with so many bytes of free memory."""
    if device == "cpu":
        return Settings(
            device=device,
            shape=TINY,
            slots=4,
            response=8,
            refresh_s=0.2,
            repetitions=1,
            rounds=2,
            sequences=4,
            length=16,
            micro_batch_tokens=32,
            matrix=128,
            copy_bytes=1 << 20,
            attention_lengths=(16, 8),
        )
    return Settings(device=device, shape=next(shape for shape in SHAPES if memory >= shape.memory))
