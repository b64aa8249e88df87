"""An environment of the package `verifiers` as one of ours.

Its own rollout runs as it is, down to the score; the model that it asks is us. What it asks next is what our model
observes, and what our model writes is the answer.
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

    The prompt's reference has a row of its dataset: `answer`, and `info` and `prompt` where it has them. Where it has
    tools a turn calls them as `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. The reward is its rubric's, and
    comes when it is done: give it its own `max_turns`, not more than the specification's turns. Raises
    ModuleNotFoundError without the package, and what the environment raises.
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
        self._asking = _proxy_client()
        self._rollout = _event_loop().create_task(self._environment.run_rollout(row, self._asking, "laminar", {}))
        asked = self._until_asked()
        if asked is None:
            raise RuntimeError(f"the environment asked nothing: {self._ended().get('stop_condition')}")
        self._known = len(messages)
        return self._observed(asked)

    def step(self, text: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        self._known += 1
        self._asking.answer(text)
        asked = self._until_asked()
        if asked is not None:
            return self._observed(asked), 0.0, False, {}
        ended = self._ended()
        return "", float(ended["reward"]), True, dict(ended.get("metrics") or {})

    def close(self) -> None:
        """Let an unfinished rollout clean up."""
        if self._rollout is not None and not self._rollout.done():
            self._rollout.cancel()
            with suppress(Exception, asyncio.CancelledError):
                _event_loop().run_until_complete(self._rollout)

    def _until_asked(self) -> Sequence[Any] | None:
        """Let the rollout run until it asks for an answer; the messages it asks with, None where it has ended."""
        question = self._asking.question
        _event_loop().run_until_complete(asyncio.wait({question, self._rollout}, return_when=asyncio.FIRST_COMPLETED))
        return question.result() if question.done() else None

    def _ended(self) -> Mapping[str, Any]:
        """What came of the rollout. Raises what it raised, RuntimeError where it says that it failed."""
        assert self._rollout is not None
        ended: Mapping[str, Any] = self._rollout.result()
        if ended.get("error"):
            raise RuntimeError(f"the environment ended with {ended['error']}")
        return ended

    def _observed(self, asked: Sequence[Any]) -> str:
        new, self._known = asked[self._known :], len(asked)
        return "\n".join(str(message.content or "") for message in new)


@lru_cache(maxsize=8)
def _load_cached(id: str, args: str) -> Any:
    import verifiers

    return verifiers.load_environment(id, **json.loads(args))


@lru_cache(maxsize=1)
def _event_loop() -> asyncio.AbstractEventLoop:
    """What an environment opens is bound to one loop, which runs while we wait for it."""
    return asyncio.new_event_loop()


def _proxy_client() -> Any:
    """A client of `verifiers` that asks whoever calls `answer`."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    class Asking(Client):
        """`question` has the messages of the next question, once it is asked."""

        def __init__(self) -> None:
            super().__init__(None)
            self.question, self._answered = _event_loop().create_future(), _event_loop().create_future()

        def answer(self, text: str) -> None:
            answered, self._answered = self._answered, _event_loop().create_future()
            self.question = _event_loop().create_future()
            answered.set_result(text)

        def setup_client(self, config: Any) -> None:
            return None

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return messages, {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **others: Any
        ) -> Response:
            self.question.set_result(prompt)
            text = await self._answered
            calls = [ToolCall(id=f"call-{n}", **call) for n, call in enumerate(tool_calls(text))] if tools else []
            said = _CALL.sub("", text).strip() if calls else text
            message = ResponseMessage(
                content=said,
                tool_calls=calls or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            )
            return Response(id="", created=0, model=model, message=message)

        async def raise_from_native_response(self, response: Any) -> None:
            """Whatever was written is an answer."""

        async def from_native_response(self, response: Any) -> Any:
            return response

        async def close(self) -> None:
            """There is nothing to let go of."""

    return Asking()


def tool_calls(text: str) -> list[dict[str, str]]:
    """The calls in `text`: each a name and its arguments as JSON. What is no call is left out."""
    calls = []
    for found in _CALL.findall(text):
        try:
            call = json.loads(found)
            calls.append({"name": str(call["name"]), "arguments": json.dumps(call.get("arguments") or {})})
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return calls
