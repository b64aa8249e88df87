"""The assignment of a machine's GPUs to rollout processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.machine import gpu_names, visible_gpus
from operators.rollout.config import RolloutConfig


def config(gpus: int, processes: int = 1, replicas: int = 1) -> RolloutConfig:
    return RolloutConfig(engine="vllm", tensor_parallel=gpus, processes=processes, replicas=replicas)


@pytest.mark.parametrize(
    ("gpus", "process", "visible", "taken"),
    [
        (1, 0, "", ""),
        (1, 0, "0", "0"),
        (1, 3, "01234567", "3"),
        (2, 3, "01234567", "67"),
        (2, 4, "01234567", "01"),  # the first GPUs of another machine
        (2, 1, "012", "01"),
        (4, 1, "76543210", "3210"),
    ],
)
def test_gpus_of_assigns_gpus_in_order(gpus: int, process: int, visible: str, taken: str) -> None:
    assert config(gpus, processes=8).gpus_of(process, visible) == tuple(taken)


@pytest.mark.parametrize(
    ("of", "visible", "says"),
    [
        (config(2), "", "rollout.tensor_parallel = 2, but this machine has 0 GPUs"),
        (config(4), "012", "rollout.tensor_parallel = 4, but this machine has 3 GPUs"),
        (config(1, 2, 3), "01", "set rollout.processes = 6 and rollout.replicas = 1"),
    ],
)
def test_gpus_of_rejects_too_few_gpus(of: RolloutConfig, visible: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        of.gpus_of(0, visible)


def test_gpus_of_assigns_only_gpus_of_the_list() -> None:
    of = RolloutConfig(engine="vllm", tensor_parallel=2, processes=2, gpus=(1, 3, 5, 7))
    assert [of.gpus_of(process, "abcdefgh") for process in range(2)] == [("b", "d"), ("f", "h")]


def test_replicas_of_a_process_share_the_cpu() -> None:
    assert config(1, 2, 3).gpus_of(0, ()) == ()


@pytest.mark.parametrize(
    ("driver", "named", "visible"),
    [
        (None, None, ()),
        (None, "0,1", ()),
        ("exit 9", None, ()),
        ("echo 'H200, 143771 MiB'; echo 'H200, 143771 MiB'", None, ("0", "1")),
        ("echo 'H200, 143771 MiB'; echo 'H200, 143771 MiB'", "1", ("1",)),
        ("echo 'H200, 143771 MiB'", " GPU-5a, GPU-5b ", ("GPU-5a", "GPU-5b")),
        ("echo 'H200, 143771 MiB'", "", ()),
        ("echo 'H200, 143771 MiB'", "-1", ()),
    ],
)
def test_visible_gpus_follow_driver_and_environment(
    driver: str | None, named: str | None, visible: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if driver is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{driver}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if named is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_gpus() == visible
    assert bool(gpu_names()) == (driver is not None and "H200" in driver)
