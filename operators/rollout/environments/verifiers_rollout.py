"""Adapter for environments of the package `verifiers`.

The environment's own rollout runs unchanged, scoring included, with a proxy client in place of its model: each request
of the rollout is an observation, and the model's next turn is the response.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class VerifiersRollout:
    """A rollout of the environment that `verifiers.load_environment(id, **args)` gives.

    The prompt's reference is a row of its dataset: `answer`, and optionally `info` and `prompt`. If it has tools, a
    turn calls them as `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. The reward is that of its rubric, at the
    end: set its own `max_turns`, at most the `turns` of the configuration. Raises ModuleNotFoundError without the
    package, and what the environment raises.
    """

    keeps_threads = True

    def __init__(self, id: str, args: Mapping[str, Any] | None = None) -> None:
        self._environment = _load_cached(id, json.dumps(args or {}, sort_keys=True))
        self._rollout: asyncio.Task[Any] | None = None

    def reset(self, prompt: Mapping[str, Any]) -> str:
        reference = prompt["reference"]
        messages = reference.get("prompt") or [{"role": "user", "content": prompt["text"]}]
        row = {"prompt": messages, "example_id": prompt["number"]}
        row |= {name: reference[name] for name in ("answer", "info") if name in reference}
        self._client = _proxy_client()
        self._rollout = _event_loop().create_task(self._environment.run_rollout(row, self._client, "laminar", {}))
        requested = self._next_request()
        if requested is None:
            raise RuntimeError(f"the environment sent no request: {self._result().get('stop_condition')}")
        self._known = len(messages)
        return self._observed(requested)

    def step(self, text: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        self._known += 1
        self._client.respond(text)
        messages = self._next_request()
        if messages is not None:
            return self._observed(messages), 0.0, False, {}
        result = self._result()
        return "", float(result["reward"]), True, dict(result.get("metrics") or {})

    def close(self) -> None:
        """Cancel an unfinished rollout and wait for its clean-up."""
        if self._rollout is not None and not self._rollout.done():
            self._rollout.cancel()
            with suppress(Exception, asyncio.CancelledError):
                _event_loop().run_until_complete(self._rollout)

    def _next_request(self) -> Sequence[Any] | None:
        """Run the rollout until its next request; returns the messages of the request, or None if it has ended."""
        request = self._client.request
        _event_loop().run_until_complete(asyncio.wait({request, self._rollout}, return_when=asyncio.FIRST_COMPLETED))
        return request.result() if request.done() else None

    def _result(self) -> Mapping[str, Any]:
        """The result of the rollout. Raises what it raised, RuntimeError if it reports an error."""
        assert self._rollout is not None
        result: Mapping[str, Any] = self._rollout.result()
        if result.get("error"):
            raise RuntimeError(f"the environment failed: {result['error']}")
        return result

    def _observed(self, messages: Sequence[Any]) -> str:
        new, self._known = messages[self._known :], len(messages)
        return "\n".join(str(message.content or "") for message in new)


@lru_cache(maxsize=8)
def _load_cached(id: str, args: str) -> Any:
    import verifiers

    return verifiers.load_environment(id, **json.loads(args))


@lru_cache(maxsize=1)
def _event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all environments of this process; it runs only while we wait for a rollout."""
    return asyncio.new_event_loop()


def _proxy_client() -> Any:
    """A client of `verifiers` whose responses come from `respond`."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    class ProxyClient(Client):
        """`request` resolves to the messages of the rollout's next request."""

        def __init__(self) -> None:
            super().__init__(None)
            self.request, self._response = _event_loop().create_future(), _event_loop().create_future()

        def respond(self, text: str) -> None:
            response, self._response = self._response, _event_loop().create_future()
            self.request = _event_loop().create_future()
            response.set_result(text)

        def setup_client(self, config: Any) -> None:
            return None

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return messages, {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **others: Any
        ) -> Response:
            self.request.set_result(prompt)
            text = await self._response
            calls = [ToolCall(id=f"call-{n}", **call) for n, call in enumerate(tool_calls(text))] if tools else []
            content = _CALL.sub("", text).strip() if calls else text
            message = ResponseMessage(
                content=content,
                tool_calls=calls or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            )
            return Response(id="", created=0, model=model, message=message)

        async def raise_from_native_response(self, response: Any) -> None:
            """Does nothing: every text is a valid response."""

        async def from_native_response(self, response: Any) -> Any:
            return response

        async def close(self) -> None:
            """Does nothing: there is nothing to free."""

    return ProxyClient()


def tool_calls(text: str) -> list[dict[str, str]]:
    """The tool calls in `text`: each a name and its arguments as JSON. Invalid calls are left out."""
    calls = []
    for found in _CALL.findall(text):
        try:
            call = json.loads(found)
            calls.append({"name": str(call["name"]), "arguments": json.dumps(call.get("arguments") or {})})
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return calls
