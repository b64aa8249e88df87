"""Asynchronous scheduling of vLLM on a CPU, where vLLM turns it off: its events and streams do nothing there.

A step has then run when vLLM begins it, but its tokens are read a step later, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform


@contextmanager
def asynchronous_scheduling() -> Iterator[None]:
    """Engines opened inside schedule asynchronously, until the process ends."""
    for name in ("Event", "Stream", "current_stream"):
        setattr(torch.cuda, name, _Nothing)
    torch.cuda.stream = lambda _: nullcontext()  # type: ignore[assignment]
    plain = CpuPlatform.check_and_update_config

    def keep(config: VllmConfig) -> None:
        plain(config)
        config.scheduler_config.async_scheduling = True

    with patch.object(CpuPlatform, "check_and_update_config", staticmethod(keep)):
        yield


class _Nothing:
    """An event or a stream whose methods do nothing."""

    def __init__(self, *_: Any, **options: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass
