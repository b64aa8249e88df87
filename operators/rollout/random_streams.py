"""The random numbers of a trajectory, the same in any row, batch, engine or process.

The uniform of a draw is a function of (seed, trajectory_id, position) alone: SplitMix64 (Steele, Lea & Flood, OOPSLA
2014) as a counter-based generator, seeded with the blake2b of seed and id. So a trajectory gets the same draws after a
move.
"""

from __future__ import annotations

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_TO_UNIT = 2.0**-53


def stream_key(seed: int, trajectory_id: str) -> int:
    """The 64-bit key of a trajectory's stream of uniforms."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{trajectory_id}".encode(), digest_size=8).digest(), "little")


def resumed_seed(seed: int, trajectory_id: str, known: int) -> int:
    """A seed in [0, 2^63) for a generator that draws the tokens after the first `known`.

    A generator starts anew with each request: a seed of the trajectory alone would give a resumed response the random
    numbers that its first tokens had.
    """
    return stream_key(seed, f"{trajectory_id}\0{known}") >> 1


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One uniform in [0, 1) per row, float64[rows], for `keys` uint64[rows] at `positions` int64[rows] from 0."""
    state = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    state ^= state >> _SHIFTS[0]
    state *= _MIX_1
    state ^= state >> _SHIFTS[1]
    state *= _MIX_2
    state ^= state >> _SHIFTS[2]
    unit: np.ndarray = (state >> np.uint64(11)) * _TO_UNIT
    return unit
