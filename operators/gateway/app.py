"""The HTTP application of the gateway: authentication, limits, routes and streams."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.responses import Response as HttpResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from infra.http_server import Connections
from infra.json_text import decode_json
from infra.kafka.producer import DeliveryFailed
from infra.models.conversations import ConversationFormat, TemplateError, content_of
from operators.gateway.chat_api import (
    ChatRequest,
    StreamedTurn,
    chat_chunks,
    choice_of,
    completion_of,
    parse_chat,
    parse_completion,
    response_message,
    usage_of,
)
from operators.gateway.claims import ClaimRequests
from operators.gateway.config import GatewayConfig
from operators.gateway.connected import while_connected
from operators.gateway.conversation import TurnPlan, plan_completion, plan_turn
from operators.gateway.encoding import EncodingThreads
from operators.gateway.episode_table import EpisodeTable, OpenEpisode
from operators.gateway.errors import ApiError, invalid
from operators.gateway.play import Player, RecordedResponse, TurnOptions
from operators.gateway.reports import parse_report
from operators.gateway.responses_api import parse_responses, response_body, response_events
from operators.gateway.served_versions import MODEL, ServedSampling, ServedVersions, version_name
from operators.io.episode_keys import PEOPLE, WORKERS, EpisodeKeys
from schemas.codec import ValueTooLarge
from schemas.records import TokenRange

log = logging.getLogger(__name__)

REPORTED = (ApiError, ValueTooLarge, DeliveryFailed, TimeoutError)
"""Errors of requests. Any other is a defect: status 500."""

MAX_SEEN = 100_000
"""Requests whose repetitions are counted."""
MAX_EPISODE_REQUESTS = 64
"""Requests of one episode that may be in progress, so that no agent can take the places of all others."""
RETRY_HEADER = "x-stainless-retry-count"
"""The number of the retry, which OpenAI's clients send."""
KEY_HEADER = "idempotency-key"
"""The client's own name of a request: a repetition has the same one, through any process of the gateway."""

RouteHandler = Callable[[Request, str], Awaitable[HttpResponse]]


@dataclass(frozen=True)
class _Endpoint:
    """An ASGI application for one path."""

    gateway: Gateway
    handler: RouteHandler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.gateway.respond(Request(scope, receive, send), self.handler, send)


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
    context: int = 2**31
    served: ServedVersions | None = None
    """Answers people; None: nobody does."""
    claims: ClaimRequests | None = None
    """Hands out episodes to agents elsewhere; None: this run starts its agents itself."""
    connections: Connections = field(default_factory=Connections)
    """Those of the server."""
    encoder: EncodingThreads = field(default_factory=EncodingThreads)
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    active: Counter[str] = field(default_factory=Counter)
    """Requests in progress by episode."""
    body_s: float = 60.0
    """Seconds in which the body of a request must arrive."""

    def application(self) -> Starlette:
        """The ASGI application. Paths are the same with the key as a bearer token and in the path."""
        handlers: dict[str, tuple[str, RouteHandler]] = {
            "/v1/chat/completions": ("POST", partial(self._complete, parse=parse_chat)),
            "/v1/completions": ("POST", partial(self._complete, parse=parse_completion)),
            "/v1/responses": ("POST", self._respond),
            "/v1/models": ("GET", self._models),
            "/v1/models/{model}": ("GET", self._model),
            "/v1/episode": ("GET", self._episode),
            "/v1/episode/end": ("POST", self._end),
            "/v1/episodes/claim": ("POST", self._claim),
            "/v1/episodes/release": ("POST", self._release),
        }
        routes = [Route(path, _Endpoint(self, each), methods=[method]) for path, (method, each) in handlers.items()]
        handlers_of_errors = {HTTPException: _http_error, Exception: _internal_error}
        return Starlette(routes=[*routes, Mount("/k/{key}", routes=routes)], exception_handlers=handlers_of_errors)

    async def respond(self, request: Request, handler: RouteHandler, send: Send) -> None:
        """Authenticate `request`, and send the response of `handler`; until its end it is in progress."""
        try:
            name = self._authenticated(request)
            with self.connections.in_progress(request.client, name), self._counted(name):
                response = await handler(request, name)
                await response(request.scope, request.receive, send)
            return
        except REPORTED as error:
            reported = api_error_of(error)
            headers = {"retry-after": "1"} if reported.status == 503 else None
            response = JSONResponse(reported.body(), reported.status, headers)
        except ClientDisconnect:
            return
        await response(request.scope, request.receive, send)

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        """Count a request of `name` while it is answered. Raises ApiError if there are too many."""
        most = self.config.max_requests
        own = (most + 1) // 2 if name in (PEOPLE, WORKERS) else MAX_EPISODE_REQUESTS  # many programs have these keys
        if self.active.total() >= most or self.active[name] >= own:
            raise ApiError(429, "too many requests are in progress; repeat it later", "rate_limit_error")
        self.active[name] += 1
        try:
            yield
        finally:
            self.active[name] -= 1
            if not self.active[name]:
                del self.active[name]

    def _authenticated(self, request: Request) -> str:
        """The episode of the request's key. Raises ApiError."""
        name = self.keys.holder_of(_key_of(request))
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
        try:
            async with asyncio.timeout(self.body_s):
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > self.config.max_body_bytes:
                        raise ApiError(413, f"the body is larger than {self.config.max_body_bytes} bytes")
        except TimeoutError as error:
            raise ApiError(408, f"the body was not complete within {self.body_s:g} s") from error
        try:
            return decode_json(data)
        except ValueError as error:
            raise invalid(f"the body is not valid JSON: {error}") from error

    async def _complete(self, request: Request, name: str, *, parse: Callable[[Any], ChatRequest]) -> HttpResponse:
        chat = parse(await self._body(request))
        created, occurrence = int(time.time()), self._occurrence(request, chat)
        if chat.stream:
            if chat.choices > 1:
                raise invalid("a stream has one choice: n must be 1", "n")
            turn = chat.turn(0, occurrence)
            follow = self._follow(name, chat, turn)
            first = await while_connected(request, anext(follow))  # errors before it have a status of their own
            chunks = chat_chunks(StreamedTurn(chat, turn, self.form, created), _chain(first, follow))
            return StreamingResponse(chunks, headers=_headers(first), media_type="text/event-stream")
        responses, choices = [], []
        for index in range(chat.choices):
            turn = chat.turn(index, occurrence)
            response = await while_connected(request, last_of(self._follow(name, chat, turn)))
            message = response_message(self.form, turn, response.token_ids)
            responses.append(response)
            choices.append(choice_of(chat, index, message, response, self.form))
        turn_id = chat.turn(0, occurrence).turn_id
        body = completion_of(chat, f"chatcmpl-{turn_id}", created, choices, usage_of(responses))
        return JSONResponse(body, headers=_headers(*responses))

    async def _respond(self, request: Request, name: str) -> HttpResponse:
        chat = parse_responses(await self._body(request))
        created = int(time.time())
        turn = chat.turn(0, self._occurrence(request, chat))
        if chat.stream:
            follow = self._follow(name, chat, turn)
            first = await while_connected(request, anext(follow))
            events = response_events(StreamedTurn(chat, turn, self.form, created), _chain(first, follow))
            return StreamingResponse(events, headers=_headers(first), media_type="text/event-stream")
        response = await while_connected(request, last_of(self._follow(name, chat, turn)))
        return JSONResponse(response_body(chat, turn, response, self.form, created), headers=_headers(response))

    def _follow(self, name: str, chat: ChatRequest, turn: TurnOptions) -> AsyncGenerator[RecordedResponse]:
        """The response to a turn of episode `name`, or to a request of PEOPLE, at each change. Raises ApiError."""
        if name == WORKERS:
            raise ApiError(403, "this key claims episodes; requests need the key of one", "permission_error")
        self._check_length(chat)
        if name != PEOPLE:
            if chat.model.startswith(f"{MODEL}:") and version_name(chat.model) != "latest":
                reason = f"agents get responses of the policy that is trained, not of {chat.model[:80]!r}: use {MODEL}"
                raise ApiError(404, reason, code="model_not_found", param="model")
            return self.player.follow(name, turn, partial(self._plan, chat, name))
        if self.served is None:
            raise ApiError(403, "this run answers agents only: gateway.serve_requests is 0", "permission_error")
        return self._follow_version(self.served, version_name(chat.model), chat)

    def _check_length(self, chat: ChatRequest) -> None:
        """Raise ApiError for messages that exceed the context whatever their tokens are, before they are encoded."""
        characters = sum(len(content_of(message)) for message in chat.messages)
        most = self.context * self.form.longest_token
        if characters > most:
            context = f"the model's context is {self.context} tokens, at most {most} characters"
            raise invalid(
                f"the request has {characters} characters, but {context}", "messages", "context_length_exceeded"
            )

    async def _follow_version(
        self, served: ServedVersions, version: str, chat: ChatRequest
    ) -> AsyncGenerator[RecordedResponse]:
        request = await self.encoder.run(PEOPLE, partial(self._served_request, chat))
        async with aclosing(served.follow(version, *request)) as responses:
            async for response in responses:
                yield response

    def _served_request(self, chat: ChatRequest) -> tuple[list[int], ServedSampling]:
        """The tokens and the sampling of a request of people. Raises ApiError."""
        form = replace(self.form, plain=True) if chat.legacy else self.form
        try:
            tokens = form.first_tokens(chat.messages, chat.tools)
        except TemplateError as error:
            raise invalid(str(error), "messages") from error
        room = self.context - len(tokens)
        if room < 1:
            reason = f"the request has {len(tokens)} tokens, but the model's context is {self.context}"
            raise invalid(reason, "messages", "context_length_exceeded")
        return tokens, ServedSampling(
            min(chat.max_tokens, room), self.form.stop_token_ids, chat.stop_strings, chat.temperature, chat.top_p
        )

    async def _plan(self, chat: ChatRequest, name: str, episode: OpenEpisode) -> TurnPlan:
        return await self.encoder.run(name, partial(self._encoded, chat, name, episode))

    def _encoded(self, chat: ChatRequest, name: str, episode: OpenEpisode) -> TurnPlan:
        try:
            if chat.legacy:
                known = self.table.tokens(name)
                tokens = [] if known is None else known.response.token_ids.to_pylist()
                plain, prompt = replace(self.form, plain=True), content_of(chat.messages[0])
                return plan_completion(prompt, chat.digest, episode.recorded, partial(tokens_in, tokens), plain)
            return plan_turn(chat.messages, chat.tools, episode.recorded, self.form)
        except TemplateError as error:
            raise invalid(str(error), "messages") from error

    def _occurrence(self, request: Request, chat: ChatRequest) -> str:
        """Which of equal requests it is: the client's key of it, or how many it has sent before without retries."""
        if key := request.headers.get(KEY_HEADER):
            return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
        seen = (_key_of(request), chat.options_digest)
        if request.headers.get(RETRY_HEADER, "0") == "0":
            self.seen[seen] += 1
            if len(self.seen) > MAX_SEEN:
                del self.seen[next(iter(self.seen))]
        return str(max(0, self.seen[seen] - 1))

    async def _models(self, request: Request, name: str) -> HttpResponse:
        return JSONResponse({"object": "list", "data": await self._known_models(name)})

    async def _model(self, request: Request, name: str) -> HttpResponse:
        wanted = request.path_params["model"]
        found = next((each for each in await self._known_models(name) if each["id"] == wanted), None)
        if found is None:
            raise ApiError(404, f"there is no model {wanted[:80]!r}: see /v1/models", code="model_not_found")
        return JSONResponse(found)

    async def _known_models(self, name: str) -> list[dict[str, Any]]:
        versions = await self.served.versions() if name == PEOPLE and self.served is not None else []
        ids = [MODEL, *([f"{MODEL}:latest"] if versions else []), *(f"{MODEL}:{each}" for each in versions)]
        return [{"id": each, "object": "model", "created": 0, "owned_by": self.run} for each in ids]

    async def _episode(self, request: Request, name: str) -> HttpResponse:
        """The state of the episode: its tokens, turns and branches."""
        _check_episode(name)
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

    async def _claim(self, request: Request, name: str) -> HttpResponse:
        return await self._claims_for(name).claim(request, await self._body(request))

    async def _release(self, request: Request, name: str) -> HttpResponse:
        body = await self._body(request)
        return await while_connected(request, self._claims_for(name).release(body))

    def _claims_for(self, name: str) -> ClaimRequests:
        if name != WORKERS:
            raise ApiError(403, "episodes are claimed with the key of `laminar agents serve`", "permission_error")
        if self.claims is None:
            raise ApiError(403, "this run starts its agents itself ([agents] command or function)", "permission_error")
        return self.claims

    async def _end(self, request: Request, name: str) -> HttpResponse:
        _check_episode(name)
        report = parse_report(await self._body(request))
        await while_connected(request, self.player.end(name, report))
        return JSONResponse({"episode": name, "finished": True, "error": self.table.error_of(name)})


def _check_episode(name: str) -> None:
    if name in (PEOPLE, WORKERS):
        raise ApiError(403, "this key is not that of an episode", "permission_error")


async def last_of(responses: AsyncGenerator[RecordedResponse]) -> RecordedResponse:
    """The last of `responses`, which is complete."""
    async with aclosing(responses):
        async for response in responses:
            if response.finish_reason:
                return response
    raise AssertionError("a turn ends with a response")


def _http_error(request: Request, error: Exception) -> HttpResponse:
    """A path or a method that there is not."""
    assert isinstance(error, HTTPException)
    reason = f"{request.method} {request.url.path[:80]}: {error.detail}; see docs/agents.md for what the gateway serves"
    return JSONResponse(ApiError(error.status_code, reason).body(), error.status_code, error.headers)


def _internal_error(request: Request, error: Exception) -> HttpResponse:
    return JSONResponse(ApiError(500, "the gateway failed: see its log", "server_error").body(), 500)


def _headers(*responses: RecordedResponse) -> dict[str, str] | None:
    return {"laminar-template": "rewritten"} if any(each.rewritten for each in responses) else None


def _key_of(request: Request) -> str:
    """The key in the path, or the bearer token."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    return str(request.path_params.get("key") or (bearer.strip() if scheme.lower() == "bearer" else ""))


def tokens_in(tokens: Sequence[int], ranges: Sequence[TokenRange]) -> list[int]:
    """The `tokens` in `ranges`, in their order."""
    return [token for each in ranges for token in tokens[each.start : each.stop]]


async def _chain(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """All parts of a streamed response. Raises ApiError, whose event ends the stream."""
    yield first
    try:
        async for each in rest:
            yield each
    except REPORTED as error:
        raise api_error_of(error) from error


def api_error_of(error: Exception) -> ApiError:
    """What a client gets for an error of `REPORTED`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValueTooLarge):
        return ApiError(413, f"the request cannot be recorded: {error}")
    log.warning("a request was not written: %s", error)
    return ApiError(503, "the log is not available; repeat the request", "server_error")
