"""Chooses the subtask in which Flink processes an element of a source.

Flink sends each element of a splittable source to the subtask of its key, and the element is its own key. A few
elements fall together by chance, so their keys are chosen by the same hashes. Sources: Beam 2.70's FlinkKey
(MurmurHash3 of the encoded key), Flink's KeyGroupRangeAssignment and MathUtils.murmurHash. With another version of
Beam the elements fall by chance again: each shard runs, wherever that is.
"""

from __future__ import annotations

_32, _64 = (1 << 32) - 1, (1 << 64) - 1
_MIN_KEY_GROUPS, _MAX_KEY_GROUPS = 128, 32768


def key_in_subtask(name: str, subtask: int, parallelism: int, key_groups: int | None = None) -> str:
    """`name`, followed if needed by a space and a number, as a key of `subtask` of `parallelism` subtasks.

    `key_groups` is Flink's maximum parallelism (None: its default).
    """
    groups = key_groups or default_key_groups(parallelism)
    tried, key = 0, name
    while subtask_of(key, parallelism, groups) != subtask % parallelism:
        tried += 1
        key = f"{name} {tried}"
    return key


def name_of_key(key: str) -> str:
    """The name in a key of `key_in_subtask`."""
    return key.partition(" ")[0]


def subtask_of(key: str, parallelism: int, key_groups: int) -> int:
    """The subtask of `key`, which Beam encodes as UTF-8 after its length."""
    encoded = key.encode()
    group = _flink_hash(_murmur3(_length(len(encoded)) + encoded)) % key_groups
    return group * parallelism // key_groups


def default_key_groups(parallelism: int) -> int:
    """Flink's maximum parallelism for operators of `parallelism`."""
    rounded: int = 1 << (parallelism + parallelism // 2 - 1).bit_length()
    return min(max(rounded, _MIN_KEY_GROUPS), _MAX_KEY_GROUPS)


def _length(size: int) -> bytes:
    """A variable-length integer, 7 bits a byte."""
    parts = bytearray()
    while size > 0x7F:
        parts.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*parts, size])


def _murmur3(data: bytes) -> int:
    """The lowest 32 bits of MurmurHash3_x64_128 of `data` with seed 0 (Austin Appleby, public domain)."""
    first = second = 0
    blocks = len(data) // 16 * 16
    for at in range(0, len(data), 16):
        block = data[at : at + 16]
        low, high = (int.from_bytes(half, "little") for half in (block[:8], block[8:]))
        first ^= _rotated(low * 0x87C37B91114253D5 & _64, 31, 64) * 0x4CF5AD432745937F & _64
        if at < blocks:
            first = (_rotated(first, 27, 64) + second) * 5 + 0x52DCE729 & _64
        second ^= _rotated(high * 0x4CF5AD432745937F & _64, 33, 64) * 0x87C37B91114253D5 & _64
        if at < blocks:
            second = (_rotated(second, 31, 64) + first) * 5 + 0x38495AB5 & _64
    first, second = first ^ len(data), second ^ len(data)
    first = first + second & _64
    second = second + first & _64
    return _final(first) + _final(second) & _32


def _final(half: int) -> int:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        half = (half ^ half >> 33) * factor & _64
    return half ^ half >> 33


def _flink_hash(code: int) -> int:
    """MathUtils.murmurHash of a 32-bit number."""
    code = _rotated(code * 0xCC9E2D51 & _32, 15, 32) * 0x1B873593 & _32
    code = _rotated(code, 13, 32) * 5 + 0xE6546B64 & _32
    code ^= 4
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        code = (code ^ code >> shift) * factor & _32
    code ^= code >> 16
    if not code >> 31:
        return code
    return (1 << 32) - code if code != 1 << 31 else 0


def _rotated(code: int, bits: int, width: int) -> int:
    return (code << bits | code >> (width - bits)) & ((1 << width) - 1)
