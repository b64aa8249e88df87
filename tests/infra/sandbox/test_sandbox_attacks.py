"""Attacks as root and as an ordinary user, with each kind of isolation: no effect outside, and a score of 0."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from sandbox_attacks import ATTACKS
from sandbox_users import ORDINARY, run_as

from infra.sandbox.run import Isolation, SandboxUnavailable, run_python

WORLD = Path(__file__).with_name("sandbox_world.py")
OF_OLD_KERNELS = ("files", "processes", "sockets")
"""Attacks that a newer Landlock would also deny: here the other layers must deny them."""

pytestmark = pytest.mark.usefixtures("confined")


def outcomes(user: int, isolation: dict[str, Any], attacks: list[str]) -> list[dict[str, Any]]:
    ran = run_as(user, [str(WORLD), json.dumps(isolation), *attacks])
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize("user", [0, ORDINARY], ids=["root", "ordinary"])
@pytest.mark.parametrize(
    ("isolation", "kinds"),
    [
        ({"namespaces": True}, ()),
        ({"namespaces": False}, ()),
        ({"namespaces": False, "newest_abi": 3}, OF_OLD_KERNELS),
    ],
    ids=["namespaces", "none", "none-abi-3"],
)
def test_attacks_have_no_effect_and_score_zero(user: int, isolation: dict[str, Any], kinds: tuple[str, ...]) -> None:
    if user != os.getuid() and os.getuid() != 0:
        if user == 0:
            pytest.skip("the tests do not run as root, so attacks cannot")
        user = os.getuid()
    try:
        run_python("", isolation=Isolation(**isolation))
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox with {isolation}: {error}")
    attacks = [name for name in ATTACKS if not kinds or name.startswith(kinds)]
    assert len(attacks) >= 60
    ran = outcomes(user, isolation, attacks)
    assert [each["attack"] for each in ran] == attacks
    assert [each for each in ran if each["value"] or each["effects"]] == []
    late = [each for each in ran if each["attack"].startswith("time") and each["seconds"] > 30]
    assert late == []
