"""The sizes of one check: the model's shape, and how much each part generates, trains and copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 1 << 30
_COMMON = {"max_position_embeddings": 4096, "tie_word_embeddings": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model: the sizes of its Qwen2 config, and the device memory that the check needs with it."""

    name: str
    config: Mapping[str, int | bool]
    memory: int


def _qwen2(hidden: int, mlp: int, layers: int, heads: int, vocabulary: int = 151_936) -> dict[str, int | bool]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        **_COMMON,
    }


SHAPES = (
    Shape(name="Qwen2.5-1.5B", config=_qwen2(1536, 8960, 28, 12), memory=70 * GIB),
    Shape(name="Qwen2.5-0.5B", config=_qwen2(896, 4864, 24, 14), memory=30 * GIB),
    Shape(name="0.1B", config=_qwen2(512, 2048, 8, 8, 32_768), memory=0),
)
"""From large to small."""
TINY = Shape(name="tiny", config=_qwen2(64, 128, 2, 4, 512), memory=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the parts measure. Times are seconds."""

    device: str
    shape: Shape
    slots: int
    response: int
    """Tokens of every response whose tokens/s are compared."""
    refresh_s: float
    repetitions: int
    rounds: int
    """Rounds of generation and training."""
    sequences: int
    """Sequences of a training batch, of `length` tokens, half of them trained."""
    length: int
    micro_batch_tokens: int
    matrix: int
    """Rows and columns of the matrices whose product is the roof."""
    copy_bytes: int
    attention_lengths: tuple[int, ...]
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
    shape = next(shape for shape in SHAPES if memory >= shape.memory)
    return Settings(
        device=device,
        shape=shape,
        slots=64,
        response=256,
        refresh_s=10.0,
        repetitions=3,
        rounds=16,
        sequences=64,
        length=512,
        micro_batch_tokens=8192,
        matrix=8192,
        copy_bytes=GIB,
        attention_lengths=(4096, 2048, 2048, *(512,) * 16),
    )
