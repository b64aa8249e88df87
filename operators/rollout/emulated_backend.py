"""The emulated backend: engines with another machine's timing, and weight versions without bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.store.errors import VersionGone
from operators.rollout.config import RolloutConfig
from operators.rollout.emulated_engine import EmulatedEngine, emulated_scheduling, share_device
from operators.rollout.emulation_config import DEFAULT_CONTEXT
from operators.rollout.engine import Engine
from operators.rollout.response_lengths import open_lengths
from operators.rollout.roofline import Roofline
from operators.rollout.tool_calls import open_tools
from schemas.records import PolicyVersion, Prompt


class AnnouncedWeights:
    """The newest `keep` announced versions; they have no bytes."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._versions: list[PolicyVersion] = []

    def announce(self, version: PolicyVersion) -> None:
        """Add a published version and evict the oldest."""
        self._versions = sorted({*self._versions, version})[-self._keep :]

    def versions(self) -> list[PolicyVersion]:
        """The available versions, oldest first."""
        return self._versions

    @contextmanager
    def pin(self, version: PolicyVersion) -> Iterator[Path]:
        """An empty file, for `version`. Raises VersionGone."""
        if version not in self._versions:
            raise VersionGone(str(version))
        yield Path(os.devnull)


class EmulatedBackend:
    """Engines as `config.emulation` describes them. One second of `clock` is `time_scale` emulated seconds.

    Raises ValueError for lengths that cannot be read and for an engine that could run no request.
    """

    def __init__(
        self,
        config: RolloutConfig,
        time_scale: float,
        keep_versions: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        emulation = config.emulation
        self._scheduling = emulated_scheduling(
            config.most_slots,
            config.context or DEFAULT_CONTEXT // emulation.stride,
            config.kv_capacity,
            emulation,
        )
        speculation = emulation.speculation if config.speculation else None
        self._roofline = Roofline(emulation.roofline, emulation.stride, speculation)
        self._lengths, self._tools = open_lengths(emulation.lengths), open_tools(emulation.tools)
        self._pull_s, self._time_scale, self._clock = emulation.pull_s, time_scale, clock
        self.weights = AnnouncedWeights(keep_versions)

    def engine_pair(self) -> tuple[Engine, Engine]:
        pair = self.engine(), self.engine()
        share_device(*pair)
        return pair

    def engine(self) -> EmulatedEngine:
        return EmulatedEngine(
            self._scheduling,
            self._roofline,
            self._lengths,
            pull_s=self._pull_s,
            time_scale=self._time_scale,
            clock=self._clock,
            tools=self._tools,
        )

    def staging(self, index: int, incarnation: int, engine: Engine, transfers: object) -> None:
        """None: an emulated engine has no weights."""

    def decode(self, token_ids: list[int]) -> str:
        """A placeholder: synthetic tokens have no text."""
        return f"{len(token_ids)} synthetic tokens"

    def encode(self, text: str) -> list[int]:
        """Raises TypeError: synthetic tokens have no text."""
        raise TypeError("an emulated engine has no tokenizer")

    def check(self, prompt: Prompt) -> None:
        """Accepts all prompts: synthetic tokens have no tokenizer."""

    def announce(self, version: PolicyVersion) -> None:
        self.weights.announce(version)

    def close(self) -> None:
        """Does nothing: there is nothing to free."""
