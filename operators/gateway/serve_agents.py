"""ServeAgents: folds the episodes of agents, and answers their requests over HTTP in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from infra.files import write_atomically
from infra.kafka.producer import BoundedProducer
from infra.models.checkpoint_folder import load_tokenizer
from infra.models.conversations import ConversationFormat
from infra.runners.step_metrics import phase
from operators.gateway.app import Gateway
from operators.gateway.chat_api import response_message
from operators.gateway.config import GatewayConfig
from operators.gateway.episode_table import EpisodeTable
from operators.gateway.play import Changes, OrderProducer, Player
from operators.io.config import ShardConfig
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, Restored
from operators.io.episode_keys import ADDRESS_FILE, SECRET_FILE, EpisodeKeys, read_or_create_secret

log = logging.getLogger(__name__)

_START_S = 30.0


@dataclass(frozen=True)
class ServeAgents:
    """A gateway of a run with `partitions` partitions. `context` is that of the model in tokens."""

    config: GatewayConfig
    shard: ShardConfig
    model: Path
    folder: Path
    partitions: int
    context: int

    def restore(self, restored: Restored) -> GatewayFold:
        tokenizer: Any = load_tokenizer(self.model)
        plain = self.config.template == "plain" or (self.config.template == "auto" and not tokenizer.chat_template)
        return GatewayFold(self, ConversationFormat(tokenizer, plain), restored.state)


class GatewayFold:
    def __init__(self, step: ServeAgents, form: ConversationFormat, state: Mapping[str, Any]) -> None:
        run, config = step.shard.run, step.config
        self._loop = asyncio.new_event_loop()
        changes = Changes(self._loop)
        self._table = EpisodeTable(
            step.partitions,
            partial(response_message, form),
            changes.notify,
            state.get("finished"),
        )
        self._orders = OrderProducer(BoundedProducer(step.shard.client), run)
        player = Player(self._table, changes, self._orders.send, step.context, config.turn_timeout_s)
        own = Path(config.secret_file) if config.secret_file else step.folder / SECRET_FILE
        keys = EpisodeKeys(run, read_or_create_secret(own, create=not config.secret_file))
        gateway = Gateway(config, run, keys, self._table, player, form)
        self._socket = listen(config, step.folder)
        self._server = uvicorn.Server(
            uvicorn.Config(
                gateway.application(),
                log_config=None,
                access_log=False,
                lifespan="off",
                ssl_certfile=config.certificate_file or None,
                ssl_keyfile=config.key_file or None,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=2,
            )
        )
        self._thread = threading.Thread(target=self._serve, name="gateway", daemon=True)
        self._ready = False

    def fold(self, polled: Polled) -> Sequence[Output]:
        with phase("track episodes"):
            self._table.fold(polled.records)
        if polled.caught_up and not self._ready:  # before, a turn that has ended might be generated again
            self._ready = True
            self._thread.start()
            log.info("agents connect to port %d", self._socket.getsockname()[1])
        return []

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        return Checkpoint(low_water=self._table.low_water(positions), state={"finished": self._table.state()})

    def busy(self) -> bool:
        return False

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
            self._loop.close()


def listen(config: GatewayConfig, folder: Path) -> socket.socket:
    """The listening socket, at the port of the run's first start; the URL is written to `folder`.

    Several processes share the port. Raises OSError if the address is not available.
    """
    file = folder / ADDRESS_FILE
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
    host = f"[{config.host}]" if ":" in config.host else config.host
    write_atomically(file, json.dumps({"url": f"{scheme}://{host}:{port}/v1", "port": port}))
    return made
