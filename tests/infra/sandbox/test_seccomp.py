"""The seccomp filter: an interpreter of classic BPF checks every call on both architectures."""

from __future__ import annotations

import pytest

from infra.sandbox.allowed_calls import ALLOWED, ANSWERED, FILTERED
from infra.sandbox.seccomp import Step, program

ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
EPERM, ENOSYS = ERROR | 1, ERROR | 38
ME = 77
THREAD = 0x3D0F00


def verdict(steps: list[Step], architecture: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """The verdict of the kernel's classic BPF interpreter for a call."""
    words = [number & 0xFFFFFFFF, architecture, 0, 0]
    for argument in (*arguments, *(0,) * (6 - len(arguments))):
        words += [argument & 0xFFFFFFFF, argument >> 32 & 0xFFFFFFFF]
    at, loaded = 0, 0
    while True:
        code, if_true, if_false, operand = steps[at]
        at += 1
        if code == 0x20:
            loaded = words[operand // 4]
        elif code == 0x54:
            loaded &= operand
        elif code == 0x05:
            at += operand
        elif code == 0x06:
            return operand
        else:
            holds = loaded == operand if code == 0x15 else loaded > operand
            at += if_true if holds else if_false


@pytest.fixture(params=[("x86_64", 0), ("aarch64", 1)], ids=["x86_64", "aarch64"])
def machine(request: pytest.FixtureRequest) -> tuple[str, int]:
    return request.param


def test_filter_denies_unlisted_calls(machine: tuple[str, int]) -> None:
    name, which = machine
    steps = program(name, ME)
    named = {numbers[which] for table in (ALLOWED, ANSWERED, FILTERED) for numbers in table.values()}
    for number in range(600):
        if number not in named:
            assert verdict(steps, ARCHITECTURES[name], number) == (EPERM if number <= 462 else ENOSYS), number
    assert verdict(steps, ARCHITECTURES[name], 0x40000000 + 1) == ENOSYS
    assert verdict(steps, 0x40000003, 1) == KILL
    assert len(steps) < 4096  # the limit of the kernel


def test_filter_allows_or_answers_listed_calls(machine: tuple[str, int]) -> None:
    name, which = machine
    steps = program(name, ME)
    numbers = [pair[which] for pair in (*ALLOWED.values(), *FILTERED.values()) if pair[which] is not None]
    assert len(numbers) == len(set(numbers))
    for pair in ALLOWED.values():
        if (number := pair[which]) is not None:
            assert verdict(steps, ARCHITECTURES[name], number, (2**64 - 1,) * 6) == ALLOW
    for *pair, error in ANSWERED.values():
        if (number := pair[which]) is not None:
            assert verdict(steps, ARCHITECTURES[name], number) == ERROR | error


@pytest.mark.parametrize(
    ("call", "arguments", "allowed"),
    [
        ("clone", (THREAD, 1, 1), True),
        ("clone", (THREAD | 0x400000,), True),
        ("clone", (17,), False),
        ("clone", (THREAD | 0x10000000,), False),
        ("clone", (THREAD & ~0x400,), False),
        ("kill", (ME, 9), True),
        ("kill", (0, 9), False),
        ("kill", (-1, 9), False),
        ("kill", (-ME, 9), False),
        ("tgkill", (ME, 78, 9), True),
        ("tgkill", (78, 78, 9), False),
        *((("fcntl", (3, command, 2**32), True)) for command in (0, 1, 2, 3, 1030, 1032)),
        ("fcntl", (3, 4, 0x800), True),
        ("fcntl", (3, 4, 0x2800), False),
        *((("fcntl", (3, command), False)) for command in (5, 6, 7, 8, 10, 15, 36, 37, 1024, 1026, 1031, 1036)),
        ("ioctl", (0, 0x5401), True),
        ("ioctl", (0, 0x5412), False),
        ("ioctl", (0, 0x8901), False),
        ("ioctl", (0, 0x5452), False),
        ("mmap", (0, 4096, 3, 0x22, -1, 0), True),
        ("mmap", (0, 4096, 3, 0x40022, -1, 0), False),
        ("futex", (1, 0x80), True),
        ("futex", (1, 0x189), True),
        ("futex", (1, 6), False),
        ("socketpair", (1, 1 | 0x80800, 0), True),
        ("socketpair", (1, 2, 0), False),
        ("socketpair", (1, 5, 0), False),
        ("socketpair", (2, 1, 0), False),
        ("sendto", (3, 1, 1, 0, 0, 0), True),
        ("sendto", (3, 1, 1, 0, 1 << 40, 16), False),
        ("sendto", (3, 1, 1, 0, 1, 16), False),
        ("prlimit64", (0, 7, 0, 1), True),
        ("prlimit64", (0, 7, 1 << 40, 0), False),
        ("prlimit64", (9, 7, 0, 1), False),
        ("prctl", (15, 1), True),
        ("prctl", (1, 0), False),
        ("prctl", (4, 1), False),
        ("sched_getaffinity", (0, 8, 1), True),
        ("sched_getaffinity", (9, 8, 1), False),
    ],
)
def test_filter_checks_arguments(
    machine: tuple[str, int], call: str, arguments: tuple[int, ...], allowed: bool
) -> None:
    name, which = machine
    result = verdict(program(name, ME), ARCHITECTURES[name], FILTERED[call][which], arguments)
    assert result == (ALLOW if allowed else EPERM)


def test_filter_raises_for_an_unknown_machine() -> None:
    with pytest.raises(OSError, match="the machine is riscv64, call numbers are known only for x86_64 and aarch64"):
        program("riscv64", ME)
