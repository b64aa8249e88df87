"""An OpenEnv environment (package `openenv`) as one of ours: a session at its server, an action a turn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any


class OpenEnvSession:
    """A session at the server `url`, reset with the prompt's number as its seed.

    A turn's text is the field `action` of an action, beside those of `more`. Observed is the field `observation` of
    what comes back; all of it, as JSON, where that is empty. What a server does must follow from seed and actions.
    Raises ModuleNotFoundError without the package, and what its client raises.
    """

    keeps_threads = True

    def __init__(self, url: str, action: str, observation: str = "", more: Mapping[str, Any] | None = None) -> None:
        from openenv.core import GenericEnvClient

        self._action, self._observation, self._more = action, observation, more or {}
        self._client = GenericEnvClient(base_url=url).sync()

    def reset(self, prompt: Mapping[str, Any]) -> str:
        return self._observed(self._client.reset(seed=prompt["number"]).observation)

    def step(self, text: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        result = self._client.step({**self._more, self._action: text})
        return self._observed(result.observation), float(result.reward or 0.0), bool(result.done), result.metadata or {}

    def close(self) -> None:
        """End the session; a server that is gone has ended it."""
        with suppress(Exception):
            self._client.close()

    def _observed(self, observation: Mapping[str, Any]) -> str:
        if not self._observation:
            return json.dumps(observation, ensure_ascii=False)
        if self._observation not in observation:
            raise ValueError(f"what was observed has no {self._observation!r}, only {sorted(observation)}")
        return str(observation[self._observation])
