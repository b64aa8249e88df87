"""The HTTP application of the gateway: authentication, limits, routes and streams."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from infra.kafka.producer import DeliveryFailed
from infra.models.conversations import ConversationFormat, TemplateError, content_of
from operators.gateway.chat_api import (
    ChatRequest,
    choice_of,
    completion_of,
    parse_chat,
    parse_completion,
    response_message,
    usage_of,
)
from operators.gateway.chat_stream import chat_chunks
from operators.gateway.config import GatewayConfig
from operators.gateway.conversation import TurnPlan, plan_completion, plan_turn
from operators.gateway.episode_table import Episode, EpisodeTable
from operators.gateway.errors import ApiError, invalid
from operators.gateway.play import Player
from operators.gateway.responses_api import parse_responses, response_body, response_events
from operators.io.episode_keys import EpisodeKeys
from schemas.records import TokenRange

log = logging.getLogger(__name__)

MAX_SEEN = 100_000
"""Requests whose repetitions are counted."""
RETRY_HEADER = "x-stainless-retry-count"
"""The number of the retry, which OpenAI's clients send."""

Handler = Callable[[Request, str], Awaitable[Response]]


@dataclass
class Gateway:
    """What the application needs. `seen` counts equal requests: a client that repeats one, without saying that it is a
    retry, gets another response."""

    config: GatewayConfig
    run: str
    keys: EpisodeKeys
    table: EpisodeTable
    player: Player
    form: ConversationFormat
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    active: int = 0

    def application(self) -> Starlette:
        """The ASGI application. Paths are the same with the key as a bearer token and in the path."""
        routes = [
            Route("/v1/chat/completions", self._route(partial(self._complete, parse=parse_chat)), methods=["POST"]),
            Route("/v1/completions", self._route(partial(self._complete, parse=parse_completion)), methods=["POST"]),
            Route("/v1/responses", self._route(self._respond), methods=["POST"]),
            Route("/v1/models", self._route(self._models), methods=["GET"]),
            Route("/v1/episode", self._route(self._episode), methods=["GET"]),
            Route("/v1/episode/end", self._route(self._end), methods=["POST"]),
        ]
        return Starlette(routes=[*routes, Mount("/k/{key}", routes=routes)])

    def _route(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            self.active += 1
            try:
                if self.active > self.config.max_requests:
                    raise ApiError(429, "too many requests are in progress; repeat it later", "rate_limit_error")
                return await handler(request, self._authenticated(request))
            except ApiError as error:
                return JSONResponse(error.body(), error.status)
            except (DeliveryFailed, TimeoutError) as error:
                log.warning("a request was not written: %s", error)
                unavailable = ApiError(503, "the log is not available; repeat the request", "server_error")
                return JSONResponse(unavailable.body(), 503, {"retry-after": "1"})
            except ClientDisconnect:
                return Response(status_code=499)
            finally:
                self.active -= 1

        return handle

    def _authenticated(self, request: Request) -> str:
        """The episode of the request's key. Raises ApiError."""
        name = self.keys.episode_of(_key_of(request))
        if name is None:
            raise ApiError(
                401,
                f"the API key is not one of an episode of run {self.run}; agents get theirs in OPENAI_API_KEY",
                "authentication_error",
                "invalid_api_key",
            )
        return name

    async def _body(self, request: Request) -> Any:
        """The JSON body. Raises ApiError."""
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > self.config.max_body_bytes:
                raise ApiError(413, f"the body is larger than {self.config.max_body_bytes} bytes")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise invalid(f"the body is not valid JSON: {error}") from error

    async def _complete(self, request: Request, name: str, *, parse: Callable[[Any, int], ChatRequest]) -> Response:
        chat = parse(await self._body(request), 2**31)
        created, plan = int(time.time()), partial(self._plan, chat, name)
        occurrence = self._occurrence(request, chat)
        if chat.stream:
            if chat.choices > 1:
                raise invalid("a stream has one choice: n must be 1", "n")
            turn = chat.turn(0, occurrence)
            follow = self.player.follow(name, turn, plan)
            first = await anext(follow)  # errors before it have a status of their own
            chunks = chat_chunks(chat, turn, _chain(first, follow), self.form, created)
            return StreamingResponse(chunks, media_type="text/event-stream")
        responses, choices = [], []
        for index in range(chat.choices):
            turn = chat.turn(index, occurrence)
            response = await self.player.turn(name, turn, plan)
            message = response_message(self.form, turn, response.token_ids)
            responses.append(response)
            choices.append(choice_of(chat, index, message, response, self.form))
        turn_id = chat.turn(0, occurrence).turn_id
        body = completion_of(chat, f"chatcmpl-{turn_id}", created, choices, usage_of(responses))
        headers = {"laminar-template": "rewritten"} if any(each.rewritten for each in responses) else None
        return JSONResponse(body, headers=headers)

    async def _respond(self, request: Request, name: str) -> Response:
        chat = parse_responses(await self._body(request), 2**31)
        created, plan = int(time.time()), partial(self._plan, chat, name)
        turn = chat.turn(0, self._occurrence(request, chat))
        if chat.stream:
            follow = self.player.follow(name, turn, plan)
            first = await anext(follow)
            events = response_events(chat, turn, _chain(first, follow), self.form, created)
            return StreamingResponse(events, media_type="text/event-stream")
        response = await self.player.turn(name, turn, plan)
        return JSONResponse(response_body(chat, turn, response, self.form, created))

    def _plan(self, chat: ChatRequest, name: str, episode: Episode) -> TurnPlan:
        try:
            if chat.legacy:
                known = self.table.tokens(name)
                tokens = [] if known is None else known.response.token_ids.to_pylist()
                plain, prompt = replace(self.form, plain=True), content_of(chat.messages[0])
                return plan_completion(prompt, chat.digest, episode.recorded, partial(tokens_in, tokens), plain)
            return plan_turn(chat.messages, chat.tools, episode.recorded, self.form)
        except TemplateError as error:
            raise invalid(str(error), "messages") from error

    def _occurrence(self, request: Request, chat: ChatRequest) -> int:
        """How often the client has sent an equal request before, retries of the same one not counted."""
        seen = (_key_of(request), chat.options_digest)
        if request.headers.get(RETRY_HEADER, "0") == "0":
            self.seen[seen] += 1
            if len(self.seen) > MAX_SEEN:
                del self.seen[next(iter(self.seen))]
        return max(0, self.seen[seen] - 1)

    async def _models(self, request: Request, name: str) -> Response:
        model = {"id": "laminar", "object": "model", "created": 0, "owned_by": self.run}
        return JSONResponse({"object": "list", "data": [model]})

    async def _episode(self, request: Request, name: str) -> Response:
        """The state of the episode: its tokens, turns and branches."""
        with self.table.locked():
            episode, partial = self.table.get(name), self.table.tokens(name)
            body: dict[str, Any] = {"episode": name, "finished": self.table.has_finished(name)}
            if episode is not None:
                turns = [turn.request for turn in episode.turns.values()]
                body |= {
                    "tokens": 0 if partial is None else len(partial),
                    "turns": len(turns),
                    "segments": sum(not turn.context for turn in turns),
                    "replica": episode.replica,
                }
        return JSONResponse(body)

    async def _end(self, request: Request, name: str) -> Response:
        body = await self._body(request)
        if not isinstance(body, dict):
            raise invalid("the body must be a JSON object")
        reward, answer, error = _reward_of(body), _text(body, "answer"), _text(body, "error")
        await self.player.end(name, reward, answer, error)
        return JSONResponse({"episode": name, "finished": True, "error": self.table.error_of(name)})


def _key_of(request: Request) -> str:
    """The key in the path, or the bearer token."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    return str(request.path_params.get("key") or (bearer.strip() if scheme.lower() == "bearer" else ""))


def tokens_in(tokens: Sequence[int], ranges: Sequence[TokenRange]) -> list[int]:
    """The `tokens` in `ranges`, in their order."""
    return [token for each in ranges for token in tokens[each.start : each.stop]]


async def _chain(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for each in rest:
        yield each


def _reward_of(body: Mapping[str, Any]) -> float | None:
    reward = body.get("reward")
    if reward is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) < float("inf"):
        raise invalid(f"reward must be a finite number, not {str(reward)[:40]}", "reward")
    return float(reward)


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid(f"{name} must be text", name)
    return value
