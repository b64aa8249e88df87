"""A gateway without Kafka: orders go to a scripted owner, whose records the episode table folds at once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
from record_factories import prompt, trajectory

from infra.models.conversations import ConversationFormat
from operators.gateway.app import Gateway
from operators.gateway.chat_api import response_message
from operators.gateway.config import GatewayConfig
from operators.gateway.episode_table import EpisodeTable
from operators.gateway.play import Changes, Player
from operators.io.elements import ReceivedRecord
from operators.io.episode_keys import EpisodeKeys
from schemas.codec import encode
from schemas.columns import flags, floats, token_ids
from schemas.records import (
    Assignment,
    EpisodeEnd,
    PolicyVersion,
    Progress,
    Response,
    Sampling,
    TurnEnded,
    TurnRequest,
    VersionSpan,
)

NAME = "p0.0"
END = 3
"""The stop token, `$`."""
BASE = 100
CONTEXT = 400
TEMPLATE_ROLES = {"system": "S", "user": "U", "assistant": "A", "tool": "T"}


class LetterTokenizer:
    """One token a character; `<role>…$` around each message of the chat template."""

    eos_token_id = END
    chat_template: str | None = "yes"

    def encode(self, text: str, **options: Any) -> list[int]:
        return [END if letter == "$" else ord(letter) + BASE for letter in text]

    def decode(self, tokens: Any, **options: Any) -> str:
        return "".join("" if token == END else chr(token - BASE) for token in tokens)

    def get_vocab(self) -> dict[str, int]:
        return {"a": ord("a") + BASE}

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> str:
        parts = [f"[{','.join(tool['function']['name'] for tool in options['tools'])}]" if options.get("tools") else ""]
        for message in conversation:
            if message["role"] not in TEMPLATE_ROLES:
                raise ValueError("no such role")
            parts.append(f"{TEMPLATE_ROLES[message['role']]}:{message['content']}$\n")
        return "".join([*parts, "A:"])


def in_response_to(order: TurnRequest, texts: list[str]) -> list[int]:
    """The tokens of the next scripted response."""
    return LetterTokenizer().encode(texts.pop(0))


class ForgettingTokenizer(LetterTokenizer):
    """Its template removes what is in parentheses from all messages but the last, as templates remove reasoning."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> str:
        *earlier, last = conversation
        kept = [{**each, "content": re.sub(r"\(.*?\)", "", each["content"])} for each in earlier]
        return super().apply_chat_template([*kept, last], **options)


class ScriptedRun:
    """The log of one episode: answers each order with the next of `texts`, as its owner would."""

    def __init__(
        self, *texts: str, plain: bool = False, budget: int = 300, tokenizer: Any = None, **config: Any
    ) -> None:
        self.texts, self.budget = list(texts), budget
        self.orders: list[TurnRequest | EpisodeEnd] = []
        self.paused = False
        self.tokenizer = tokenizer or LetterTokenizer()
        self.form = ConversationFormat(self.tokenizer, plain)
        self.keys = EpisodeKeys("run", "a secret of a run")
        self.offsets = {"inbox": 0, "progress": 0, "trajectories": 0}
        self.log: list[ReceivedRecord] = []
        self.config = GatewayConfig(**config)

    def prompt(self) -> Any:
        sampling = Sampling(1.0, 1.0, 0, self.budget, (END,), 0)
        return prompt(0, 1, sampling=sampling, environment="agent")

    def open(self) -> Gateway:
        """A gateway that has read the log so far, as a second one would."""
        self.changes = Changes(asyncio.get_running_loop())
        self.table = EpisodeTable(
            1, lambda turn, tokens: response_message(self.form, turn, tokens), self.changes.notify
        )
        self.table.fold(self.log)
        player = Player(self.table, self.changes, self.send, CONTEXT, self.config.turn_timeout_s)
        return Gateway(self.config, "run", self.keys, self.table, player, self.form, CONTEXT)

    def assign(self, lease: int = 1, keep: int | None = None) -> None:
        """Assign the episode under `lease`, with the first `keep` recorded tokens."""
        known_part, spans = None, ()
        if keep:
            known = self.table.tokens(NAME)
            assert known is not None
            response = known.response
            columns = (response.token_ids, response.logprobs, response.loss_mask)
            known_part, spans = (
                Response(*(each.slice(0, keep) for each in columns)),
                (VersionSpan(PolicyVersion(1, 0), keep),),
            )
        self.write("inbox", Assignment(self.prompt(), 0, lease, 1, lease, 1, None, known_part, 0, spans))

    def write(self, topic: str, *records: Any) -> None:
        received = []
        for record in records:
            received.append(ReceivedRecord(topic, 0, self.offsets[topic], record))
            self.offsets[topic] += 1
        self.log += received
        self.table.fold(received)

    def send(self, order: TurnRequest | EpisodeEnd) -> None:
        encode(order)  # as the producer does
        paused = self.paused  # read before a waiting test continues
        self.write("inbox", order)  # also before: this is a thread of its own
        self.orders.append(order)
        if not paused:
            self.respond(order)

    def respond(self, order: TurnRequest | EpisodeEnd) -> None:
        """Write what the owner writes for `order`."""
        if isinstance(order, EpisodeEnd):
            ended = trajectory(self.prompt(), 0, error=order.error, finish_reason="failed" if order.error else "stop")
            self.write("trajectories", ended)
            return
        if order.start < self.table.length(NAME):
            return
        new, drawn = order.token_ids.to_pylist(), in_response_to(order, self.texts)[: order.max_tokens]
        mask = [*[False] * len(new), *[True] * len(drawn)]
        gained = Response(token_ids([*new, *drawn]), floats([-0.5 * each for each in mask]), flags(mask))
        owner = (order.lease, 1, order.replica, order.incarnation)
        span = (VersionSpan(PolicyVersion(1, 0), len(mask)),)
        stop = order.start + len(mask)
        reason = "stop" if drawn and drawn[-1] == END else "length"
        turn = TurnEnded(NAME, order.lease, order.replica, 1, order.turn_id, order.start, stop, reason, None, 0)
        self.write("progress", Progress(NAME, *owner, order.start, gained, span, None, 0, 0), turn)

    def gain(self, order: TurnRequest, tokens: int) -> None:
        """Write `tokens` more tokens of the turn of `order`, which goes on; with none only wake who waits."""
        at, owner = max(order.start, self.table.length(NAME)), (order.lease, 1, order.replica, order.incarnation)
        gained = Response(token_ids([BASE] * tokens), floats([-0.5] * tokens), flags([True] * tokens))
        span = (VersionSpan(PolicyVersion(1, 0), tokens),)
        self.write("progress", *([Progress(NAME, *owner, at, gained, span, None, 0, 0)] if tokens else []))

    def recorded(self, order: TurnRequest) -> str:
        """The text that the model read for `order`, `$` for the stop token."""
        known = self.table.tokens(NAME)
        assert known is not None
        tokens = known.response.token_ids.to_pylist()
        read = [token for each in order.context for token in tokens[each.start : each.stop]]
        return "".join("$" if t == END else chr(t - BASE) for t in [*read, *order.token_ids.to_pylist()])


Scenario = Callable[[ScriptedRun, httpx2.AsyncClient], Awaitable[None]]


def play(run: ScriptedRun, scenario: Scenario, key: str | None = None) -> None:
    """Run `scenario` with a client of a gateway over `run`, whose episode is assigned."""

    async def main() -> None:
        gateway = run.open()
        run.assign()
        headers = {"authorization": f"Bearer {run.keys.key_of(NAME) if key is None else key}"}
        transport = httpx2.ASGITransport(app=gateway.application())
        async with httpx2.AsyncClient(transport=transport, base_url="http://gateway/v1", headers=headers) as client:
            await scenario(run, client)

    asyncio.run(main())


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def chat(client: httpx2.AsyncClient, *messages: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The body of a chat completion."""
    response = await client.post("/chat/completions", json={"model": "laminar", "messages": [*messages], **options})
    body: dict[str, Any] = response.json()
    return body
