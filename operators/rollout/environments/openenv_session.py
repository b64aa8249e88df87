"""Adapter for OpenEnv environments (package `openenv`): a session at a server, one action per turn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any


class OpenEnvSession:
    """A session at the server `url`, reset with the prompt's number as its seed.

    A turn's text is the field `action` of an action, together with the fields `extra_fields`. The observation is the
    field `observation` of the result, or all of it as JSON if `observation` is empty. The server must be deterministic
    given seed and actions. Raises ModuleNotFoundError without the package, and what its client raises.
    """

    keeps_threads = True

    def __init__(
        self, url: str, action: str, observation: str = "", extra_fields: Mapping[str, Any] | None = None
    ) -> None:
        from openenv.core import GenericEnvClient

        self._action, self._observation, self._extra_fields = action, observation, extra_fields or {}
        self._client = GenericEnvClient(base_url=url).sync()

    def reset(self, prompt: Mapping[str, Any]) -> str:
        return self._observed(self._client.reset(seed=prompt["number"]).observation)

    def step(self, text: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        result = self._client.step({**self._extra_fields, self._action: text})
        return self._observed(result.observation), float(result.reward or 0.0), bool(result.done), result.metadata or {}

    def close(self) -> None:
        """End the session; errors of a lost server are ignored."""
        with suppress(Exception):
            self._client.close()

    def _observed(self, observation: Mapping[str, Any]) -> str:
        if not self._observation:
            return json.dumps(observation, ensure_ascii=False)
        if self._observation not in observation:
            raise ValueError(f"the observation has no field {self._observation!r}, only {sorted(observation)}")
        return str(observation[self._observation])
