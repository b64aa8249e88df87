"""The configuration of an emulated engine: the speed of the emulated machine, and the lengths of responses.

Token counts are of emulated tokens unless they say "real". With `stride` above 1 each emulated token represents so many
real ones and takes their time: the dynamics are those of the real lengths, with less data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

from annotated_types import Ge

from infra.setting_types import CheckedSettings, NonNegative, NonNegativeInt, Positive, PositiveInt, Share

DEFAULT_CONTEXT = 18_432
"""Default context in real tokens: 2K of prompt and 16K of response."""


@dataclass(frozen=True)
class RooflineConfig(CheckedSettings):
    """The duration of a round of real tokens. Raises ValueError naming the field that is invalid.

    The default is Qwen2.5-32B, tensor-parallel on four H800: decode steps from the Laminar paper (arXiv 2510.12633).
    One token of its KV is 64 layers × 8 heads × 128 × 2 × 2 bytes, 64 KiB on each of the four; reading it at 3.35 TB/s
    takes 19.6 ns, so 4,096 tokens take 80 µs: less than the cost of one more request in the table. Prefill is bound by
    compute: 2 × 32.8e9 operations per token at half of 4 × 989 TFLOPS take 33 µs.
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
    """Batch size, and milliseconds of a decode step at `decode_context`; interpolated and extrapolated linearly."""
    decode_context: NonNegativeInt = 4096
    """Tokens of each request when `decode_ms` was measured."""
    kv_ns: NonNegative = 19.6
    """Nanoseconds in which a decode step reads one token of KV."""
    prefill_us: NonNegative = 33.0
    """Microseconds to prefill one token; samples of a prompt that run together share its prefill."""
    kv_move_us: NonNegative = 2.6
    """Microseconds to transfer the KV of one token of a moved trajectory: 256 KiB at 100 GB/s per machine, the network
    of the paper's relays. Transfers overlap with the rounds; only their own trajectory waits."""

    def _check(self) -> None:
        batches = [batch for batch, _ in self.decode_ms]
        if len(batches) < 2 or batches[0] != 1 or any(b <= a for a, b in pairwise(batches)):
            raise ValueError("decode_ms must have two rows or more, by increasing batch size from 1")
        for batch, milliseconds in self.decode_ms:
            reading = self.kv_ns * 1e-6 * self.decode_context * batch
            if milliseconds <= reading:
                raise ValueError(
                    f"decode_ms: {milliseconds} ms at batch {batch} is less than its KV reads take ({reading:.1f})"
                )


@dataclass(frozen=True)
class LengthsConfig(CheckedSettings):
    """Response lengths: lognormal, or from a file. Raises ValueError naming the field that is invalid."""

    p50: Annotated[float, Ge(1)] = 2000.0
    """Median length in tokens."""
    p99: float = 16000.0
    """99th percentile of drawn response lengths, in tokens."""
    file: str = ""
    """JSONL or Parquet with a column `length` and, optionally, `trajectory_id`; other trajectories get lengths drawn
    from it. Empty: lognormal."""

    def _check(self) -> None:
        if not self.p50 <= self.p99:
            raise ValueError(f"p50 must be between 1 and p99, not {self.p50} and {self.p99}")


@dataclass(frozen=True)
class SpeculationEmulation(CheckedSettings):
    """The drafts of an emulated engine with `rollout.speculation`. Raises ValueError naming the invalid field."""

    draft_share: Share = 0.5
    """Share of steps in which a trajectory has a draft. It depends on the task: examples/gcd.toml has 0.8 to 1."""
    acceptance: Share = 0.7
    """Probability that a draft token is accepted after those before it were; examples/gcd.toml has 0.89 to 0.96."""


@dataclass(frozen=True)
class ToolsEmulation(CheckedSettings):
    """Calls of tools during emulated responses. Raises ValueError naming the field that is invalid.

    A request leaves the batch while its call is under way, and continues with its KV, which does not count meanwhile:
    an engine may evict it. A call starts again if its request moves to another replica, or is interrupted for newer
    weights.
    """

    most_calls: NonNegativeInt = 0
    """A response makes 1 to this many calls, at equal distances; 0: none."""
    p50_s: Positive = 10.0
    """Median duration of a call in emulated seconds."""
    p99_s: Positive = 300.0
    """99th percentile of the duration of a call."""
    limit_s: Positive = 600.0
    """A call ends after so many emulated seconds at the latest."""

    def _check(self) -> None:
        if self.p50_s > self.p99_s:
            raise ValueError(f"p50_s must be at most p99_s, not {self.p50_s} and {self.p99_s}")


@dataclass(frozen=True)
class EngineEmulation(CheckedSettings):
    """The engine that a replica emulates. Raises ValueError naming the field that is invalid."""

    roofline: RooflineConfig = field(default_factory=RooflineConfig)
    lengths: LengthsConfig = field(default_factory=LengthsConfig)
    speculation: SpeculationEmulation = field(default_factory=SpeculationEmulation)
    tools: ToolsEmulation = field(default_factory=ToolsEmulation)
    stride: PositiveInt = 1
    """Real tokens per emulated token."""
    block: PositiveInt = 16
    """KV block size in tokens."""
    round_prefill: PositiveInt = 8192
    """Maximum real prefill tokens of one round; a longer context is prefilled in a round of its own."""
    vocabulary: Annotated[int, Ge(2)] = 32_000
    """Size of the emulated vocabulary."""
    pull_s: NonNegative = 0.57
    """Emulated seconds in which a replica loads new weights from host memory (PCIe, 32B over four GPUs)."""
