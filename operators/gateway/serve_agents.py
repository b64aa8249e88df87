"""ServeAgents: folds the episodes of agents, and answers their requests over HTTP in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from infra.clocks import wall_ms
from infra.files import create_secret, read_secret, write_atomically
from infra.http_server import Connections, HttpServer, raise_file_limit
from infra.kafka.producer import BoundedProducer
from infra.models.checkpoint_folder import load_tokenizer
from infra.models.conversations import ConversationFormat
from infra.processes import locked
from infra.runners.step_metrics import phase
from operators.gateway.app import Gateway
from operators.gateway.chat_api import response_message
from operators.gateway.claims import ClaimRequests, Claims
from operators.gateway.config import GatewayConfig
from operators.gateway.episode_table import EpisodeTable, OpenEpisode
from operators.gateway.play import Changes, Player, send_order
from operators.gateway.served_versions import ServedVersions
from operators.gateway.turn_tree import leaf_turns, times_of
from operators.io.config import ShardConfig
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, ReceivedRecord, Restored, ShardFold
from operators.io.episode_keys import ADDRESS_FILE, SECRET_FILE, SERVING_LOG, EpisodeKeys
from schemas.records import Metric
from schemas.topics import INBOX, METRICS, TRAJECTORIES

NAME = "agents"
EVERY_MS = 2000
"""A metric is written at most this often."""


class EpisodeCounts:
    """Counts the episodes of process `index` of `processes`: the others count theirs.

    `state` is that of the last commit: a restart reads records again that are counted already.
    """

    def __init__(self, index: int, processes: int, state: Mapping[str, Mapping[str, float]] | None = None) -> None:
        self._index, self._processes = index, processes
        state = state or {}
        self._totals: Counter[str] = Counter(state.get("totals", {}))
        self._counted = dict(state.get("counted", {}))
        self._published = self._values()
        self._published_at = 0

    def add(self, episode: OpenEpisode, received: ReceivedRecord) -> None:
        """Count a finished episode; `received` is its trajectory."""
        trajectory = received.record
        if received.offset < self._counted.get(str(received.partition), 0):
            return
        if trajectory.prompt.number % self._processes != self._index:
            return
        turns = episode.ended_turns()
        times = times_of(
            episode.assigned_at,
            [(turn.request.written_at, turn.ended.written_at) for turn in turns],
            trajectory.finished_at,
        )
        self._totals.update(
            {
                "episodes": 1,
                "failed": trajectory.finish_reason == "failed",
                "turns": len(turns),
                "conversations": len(leaf_turns(turns)),
                "tool_calls": episode.tool_calls,
                "rewritten": sum(bool(turn.request.rewritten) for turn in turns),
                **{f"{name}_s": value for name, value in times._asdict().items()},
            }
        )

    def metric(self, now: int) -> Metric | None:
        """The totals at `now` (Unix milliseconds), if they are new and the last metric is old enough."""
        totals = self._values()
        if totals == self._published or 0 <= now - self._published_at < EVERY_MS:
            return None
        self._published, self._published_at = totals, now
        return Metric(NAME, self._index, totals, now)

    def state(self, positions: Mapping[PartitionKey, int]) -> dict[str, Any]:
        """The totals once all records before `positions` are folded, for the commit note."""
        for place, offset in positions.items():
            if place.topic == TRAJECTORIES.short_name:
                self._counted[str(place.partition)] = offset
        return {"totals": self._values(), "counted": dict(self._counted)}  # the note is written later

    def _values(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._totals.items()}


log = logging.getLogger(__name__)

_START_S = 30.0


@dataclass(frozen=True)
class HandOut:
    """How episodes are handed out to agents elsewhere: each attempt has `timeout_s` seconds."""

    timeout_s: float
    retries: int


@dataclass(frozen=True)
class ServeAgents:
    """A gateway of a run with `partitions` partitions. `context` is that of the model in tokens; at most `most_tokens`
    of an episode are trained, or its last conversation. `serve_command` starts the process that answers people, which
    reads `serve_setup` first.
    Without `hand_out` the run starts its agents itself.
    """

    config: GatewayConfig
    shard: ShardConfig
    model: Path
    folder: Path
    partitions: int
    context: int
    most_tokens: int = 65_536
    serve_command: tuple[str, ...] = ()
    serve_setup: str | None = None
    hand_out: HandOut | None = None

    def restore(self, restored: Restored) -> GatewayFold:
        tokenizer: Any = load_tokenizer(self.model)
        plain = self.config.template == "plain" or (self.config.template == "auto" and not tokenizer.chat_template)
        return GatewayFold(self, ConversationFormat(tokenizer, plain), restored.state)


class GatewayFold(ShardFold):
    def __init__(self, step: ServeAgents, form: ConversationFormat, state: Mapping[str, Any]) -> None:
        run, config = step.shard.run, step.config
        self._loop = asyncio.new_event_loop()
        changes = Changes(self._loop)
        self._counts = EpisodeCounts(step.shard.shard, config.processes, state.get("counts"))
        self._table = EpisodeTable(
            step.partitions,
            partial(response_message, form),
            changes.notify,
            state.get("finished"),
            self._counts.add,
        )
        self._orders = BoundedProducer(step.shard.client)
        player = Player(
            *(
                self._table,
                changes,
                partial(send_order, self._orders, INBOX.name(run)),
                step.context,
                config.turn_timeout_s,
            ),
            branches=config.branches,
            most_tokens=step.most_tokens,
        )
        own = Path(config.secret_file) if config.secret_file else step.folder / SECRET_FILE
        if not config.secret_file:
            create_secret(own)
        keys = EpisodeKeys(run, read_secret(own))
        raise_file_limit()
        connections = Connections()
        self._served = None
        if config.serve_requests and step.serve_command:
            work = step.folder / f"served-{step.shard.shard}"
            served = ((*step.serve_command, str(work)), config.serve_requests, step.folder / SERVING_LOG)
            self._served = ServedVersions(*served, timeout_s=config.turn_timeout_s, work=work, setup=step.serve_setup)
        claims = None
        if step.hand_out is not None:
            how = step.hand_out
            order = (step.shard.shard, config.processes, how.timeout_s, how.retries, time.monotonic)
            claims = ClaimRequests(Claims(self._table, *order), player, keys)
        gateway = Gateway(
            *(config, run, keys, self._table, player, form, step.context, self._served, claims),
            connections=connections,
        )
        self._server = HttpServer(gateway.application(), connections, server_context(config))
        self._socket = listen(config, step.folder)
        self._thread = threading.Thread(target=self._serve, name="gateway", daemon=True)
        self._ready = False

    def fold(self, polled: Polled) -> Sequence[Output]:
        with phase("track episodes"):
            self._table.fold(polled.records)
        if polled.caught_up and not self._ready:  # before, a turn that has ended might be generated again
            self._ready = True
            self._thread.start()
            log.info("agents connect to port %d", self._socket.getsockname()[1])
        metric = self._counts.metric(wall_ms())
        return [] if metric is None else [Output(METRICS, metric.name, metric)]

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        return Checkpoint(
            low_water=self._table.low_water(positions),
            state={"finished": self._table.state(), "counts": self._counts.state(positions)},
        )

    def close(self) -> None:
        self._server.should_exit = True
        if self._ready:
            self._thread.join(_START_S)
        self._socket.close()
        self._orders.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._server.serve(sockets=[self._socket]))
        finally:
            if self._served is not None:
                self._served.close()
            self._loop.close()


_held: list[socket.socket] = []


def hold_listener(config: GatewayConfig, folder: Path) -> None:
    """Listen for the gateway that will be forked from this process, and for its successors: while none runs, requests
    wait for the next one instead of being refused. Several gateways answer for one another, so each listens itself.

    A problem is left for the gateway to report.
    """
    if config.processes == 1 and not _held:
        with suppress(OSError, ValueError, KeyError, TypeError):  # the file with the port of the first start is damaged
            _held.append(listen(config, folder))


def release_listener() -> None:
    """Close what `hold_listener` holds in this process: connections are refused once no gateway listens."""
    while _held:
        _held.pop().close()


def listen(config: GatewayConfig, folder: Path) -> socket.socket:
    """The listening socket, at the port of the run's first start; the URL is written to `folder`.

    Several processes share the port. Raises OSError if the address is not available.
    """
    if _held:
        return _held[0].dup()
    folder.mkdir(parents=True, exist_ok=True)
    with nullcontext() if config.port else locked(folder / f"{ADDRESS_FILE}.lock"):  # else each may find a port
        return _listen(config, folder / ADDRESS_FILE)


def _listen(config: GatewayConfig, file: Path) -> socket.socket:
    port = config.port
    if not port and file.exists():
        port = int(json.loads(file.read_text())["port"])
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if config.processes > 1:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind((config.host, port))
        made.listen(1024)
    except OSError as error:
        made.close()
        raise OSError(f"gateway: cannot listen at {config.host}:{port}: {error.strerror}") from error
    port = made.getsockname()[1]
    scheme = "https" if config.certificate_file else "http"
    host = config.advertise or config.host
    host = f"[{host}]" if ":" in host else host
    write_atomically(file, json.dumps({"url": f"{scheme}://{host}:{port}/v1", "port": port}))
    return made


def server_context(config: GatewayConfig) -> ssl.SSLContext | None:
    """TLS 1.3 with the certificate of `config`; None without one. Raises ValueError if it cannot be used."""
    if not config.certificate_file:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(config.certificate_file, config.key_file)
    except OSError as error:  # ssl.SSLError is one
        files = f"gateway.certificate_file {config.certificate_file} and gateway.key_file {config.key_file}"
        raise ValueError(f"{files} cannot be used: {error}") from error
    return context
