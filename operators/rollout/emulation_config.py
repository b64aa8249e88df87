"""What an emulated engine is told: how fast the machine is that it stands for, and how long its answers are.

All counts of tokens are of emulated tokens. Where `stride` is above 1 each of them stands for so many real ones, and
takes their time: the dynamics are those of the real lengths, with so much less data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

DEFAULT_CONTEXT = 18_432
"""Real tokens of prompt and response together where nothing else is said: 2K and 16K."""


@dataclass(frozen=True)
class RooflineConfig:
    """How long a round of real tokens takes. Raises ValueError naming the field that does not fit.

    The default is Qwen2.5-32B, tensor-parallel on four H800: decode steps from the Laminar paper (arXiv 2510.12633).
    A token of its KV is 64 layers × 8 heads × 128 × 2 × 2 bytes, 64 KiB on each of the four; at 3.35 TB/s it is read in
    19.6 ns, of which 4,096 make 80 µs: within what the table says that one more request costs. Prefill is bound by
    compute: 2 × 32.8e9 operations a token at half of 4 × 989 TFLOPS take 33 µs.
    """

    decode_ms: tuple[tuple[int, float], ...] = (
        (1, 10.7),
        (8, 11.5),
        (16, 13.0),
        (32, 15.0),
        (64, 18.5),
        (128, 26.0),
        (256, 37.5),
    )
    """Requests in the batch, and milliseconds of a decode step at `decode_context`; linear between and beyond."""
    decode_context: int = 4096
    """Tokens that each request had when `decode_ms` was measured."""
    kv_ns: float = 19.6
    """Nanoseconds a decode step takes to read one token of KV."""
    prefill_us: float = 33.0
    """Microseconds that one token of a new context takes; samples of a prompt that run together share its cost."""
    kv_move_us: float = 2.6
    """Microseconds in which the KV of one token of a trajectory that moves comes in: 256 KiB over a network of 100 GB/s
    a machine, which is what the paper's relays reckon with. It comes beside the rounds; its trajectory waits for it."""

    def __post_init__(self) -> None:
        batches = [batch for batch, _ in self.decode_ms]
        if len(batches) < 2 or batches[0] != 1 or any(b <= a for a, b in pairwise(batches)):
            raise ValueError("decode_ms must have two rows at least, by rising batch size from 1 on")
        for name in ("decode_context", "kv_ns", "prefill_us", "kv_move_us"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        for batch, milliseconds in self.decode_ms:
            reading = self.kv_ns * 1e-6 * self.decode_context * batch
            if milliseconds <= reading:
                raise ValueError(
                    f"decode_ms: {milliseconds} ms at batch {batch} is less than its KV takes to read ({reading:.1f})"
                )


@dataclass(frozen=True)
class LengthsConfig:
    """How long answers are: lognormal, or those of a file. Raises ValueError naming the field that does not fit."""

    p50: float = 2000.0
    """Median number of tokens."""
    p99: float = 16000.0
    file: str = ""
    """JSONL or Parquet with a column `length`, and `trajectory_id` where known; those without get lengths drawn of it.
    Empty: lognormal."""

    def __post_init__(self) -> None:
        if not 1 <= self.p50 <= self.p99:
            raise ValueError(f"p50 must be between 1 and p99, not {self.p50} and {self.p99}")


@dataclass(frozen=True)
class EngineEmulation:
    """The engine that a replica emulates. Raises ValueError naming the field that does not fit."""

    roofline: RooflineConfig = field(default_factory=RooflineConfig)
    lengths: LengthsConfig = field(default_factory=LengthsConfig)
    stride: int = 1
    """Real tokens that an emulated one stands for."""
    block: int = 16
    """Tokens of KV that are taken at a time."""
    round_prefill: int = 8192
    """Real tokens of new contexts that are computed in one round; a longer one is computed by itself."""
    vocabulary: int = 32_000
    pull_s: float = 0.57
    """Emulated seconds in which a replica takes new weights from its machine's memory (PCIe, 32B over four GPUs)."""

    def __post_init__(self) -> None:
        for name, least in (("stride", 1), ("block", 1), ("round_prefill", 1), ("vocabulary", 2), ("pull_s", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
