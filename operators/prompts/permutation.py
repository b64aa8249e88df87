"""A shuffled order that is computed, not stored: constant time and memory for any position of any epoch."""

from __future__ import annotations

import hashlib

_ROUNDS = 4


class Permutation:
    """A pseudorandom permutation of range(size), a function of (size, seed, epoch) only.

    A Feistel network over the next even power of two, applied until the value is in the range (cycle walking): at most
    four steps on average (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self._size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._key = b"%d/%d" % (seed, epoch)

    def __getitem__(self, position: int) -> int:
        """The element at `position`. Raises IndexError outside the range."""
        if not 0 <= position < self._size:
            raise IndexError(position)
        value = self._encrypt(position)
        while value >= self._size:
            value = self._encrypt(value)
        return value

    def _encrypt(self, value: int) -> int:
        mask = (1 << self._half_bits) - 1
        left, right = value >> self._half_bits, value & mask
        for number in range(_ROUNDS):
            digest = hashlib.blake2b(b"%d/%d" % (number, right), digest_size=8, key=self._key).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        return left << self._half_bits | right
