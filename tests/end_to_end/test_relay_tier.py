"""Relays with separate stores, as on separate machines, under a real placement and trainer: whichever relay is killed,
all others receive the weights, no process restarts, and received chunks are not sent again."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from laminar_runs import Command, CommandServer, kill_processes_in
from small_runs import SMALL
from trainer_batches import make_batch

from infra.files import read_secret
from infra.kafka.broker import Broker
from infra.kafka.observer import Observer
from infra.kafka.producer import BoundedProducer
from infra.kafka.topic_reader import read_topic
from infra.store.names import default_root
from infra.store.ownership import remove_store
from infra.transport.handshake import HandshakeRejected, connect
from pipelines.config import load_config
from pipelines.run.topics import make_topics
from schemas.codec import encode
from schemas.records import RelayChain, RelayStatus, WeightVersion
from schemas.topics import BATCHES, RELAY_CHAIN

CHUNK = 64 << 10
PACE = 1.5
"""10^6 bytes per second on each link: a version of the small model takes two seconds, in which relays are killed."""


class Tier:
    """Placement, a trainer and relays 0, 1, 2; relay 0 shares the trainer's store. `batch` leads to a new version."""

    def __init__(
        self, stack: ExitStack, command_server: CommandServer, broker: Broker, run: str, model: Path, here: Path
    ) -> None:
        self._command_server, self._here, self._run = command_server, here, run
        self._roots = [default_root(f"{run}-machine-{index}") for index in range(3)]
        for root in self._roots:
            stack.callback(remove_store, root, in_use=True)
        settings = {
            "run": {"name": run, "folder": str(here / "runs")},
            "kafka": {"bootstrap_servers": broker.bootstrap_servers},
            "model": {"path": str(model)},
            "trainer": {"optimizer_steps": 99, "checkpoint_every": 99},
            "placement": {"heartbeat_timeout_s": 15.0},
            "relay": {"heartbeat_s": 0.1, "chunk_bytes": CHUNK, "max_megabytes_per_s": PACE, "deltas": False},
        }
        self._config = here / "config.toml"
        self._config.write_text(tomli_w.dumps({**SMALL, **settings}))
        self._client = load_config(self._config).kafka.client()
        make_topics(load_config(self._config))
        self._observer = stack.enter_context(Observer(self._client, run))
        self._producer = BoundedProducer(self._client)
        stack.callback(self._producer.close)
        self._batches = 0
        self.statuses: dict[int, RelayStatus] = {}
        self._in_part: set[tuple[int, str]] = set()
        """Relays that have reported a part of a version."""
        self.emptied: set[int] = set()
        """Relays that have reported no versions."""
        self.newest: WeightVersion | None = None
        self.placement = self._submit("placement", 0)
        self.trainer = self._submit("trainer", 0)
        self.relays: dict[int, Command] = {}
        for index in range(3):
            self.start(index)

    @property
    def commands(self) -> list[Command]:
        return [self.placement, self.trainer, *self.relays.values()]

    def start(self, relay: int) -> None:
        self.relays[relay] = self._submit("relay", relay)

    def kill(self, relay: int) -> None:
        self.relays.pop(relay).clean_up()
        del self.statuses[relay]

    def lose_store(self, relay: int) -> None:
        """The machine of `relay` loses its shared memory."""
        self.emptied.discard(relay)
        shutil.rmtree(self._roots[relay])

    def lose_files(self, relay: int) -> None:
        """All versions on the machine of `relay` vanish under it; returns once it says so."""
        self.emptied.discard(relay)
        for file in self._roots[relay].glob("1.*"):
            file.unlink()
        self.until(lambda: relay in self.emptied, f"relay {relay} without versions")

    def batch(self) -> None:
        for part in make_batch(self._batches, number=self._batches):
            value, headers = encode(part)
            self._producer.send(BATCHES.name(self._run), value, headers=headers, partition=0)
        self._producer.flush(10)
        self._batches += 1

    def until(self, condition: Callable[[], Any], message: str) -> Any:
        """Poll heartbeats until `condition` is true; returns its value. Fails if a command ends."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if value := condition():
                return value
            for row in self._observer.poll(0.1):
                if isinstance(row, RelayStatus) and row.relay in self.relays:
                    self.statuses[row.relay] = row
                    if not row.versions:
                        self.emptied.add(row.relay)
                    if 4 * CHUNK < row.arrived_bytes < row.arriving_bytes // 2:
                        self._in_part.add((row.relay, str(row.arriving)))
                elif isinstance(row, WeightVersion):
                    self.newest = row
            ended = [command for command in self.commands if command.exit_code() is not None]
            assert not ended, "\n".join(command.output()[-3000:] for command in ended)
        logs = "\n".join(command.output()[-3000:] for command in self.commands)
        raise AssertionError(f"{message}: timed out; relays reported {self.statuses}\n{logs}")

    def until_all_have(self, number: int) -> None:
        """Wait until every live relay has version 1.`number`."""
        relays = self.relays
        all_have = lambda: all(f"1.{number}" in self.statuses[r].versions for r in relays if r in self.statuses)  # noqa: E731
        self.until(lambda: relays.keys() <= self.statuses.keys() and all_have(), f"version 1.{number} everywhere")

    def until_some_of(self, number: int, relay: int) -> None:
        """Wait until `relay` has a part of version 1.`number`."""
        self.until(lambda: (relay, f"1.{number}") in self._in_part, f"part of version 1.{number} at relay {relay}")

    def until_chain(self) -> list[int]:
        """The order of the live relays, once all of them report the newest chain and it is complete."""

        def order() -> list[int]:
            chains = [row for record in read_topic(self._client, RELAY_CHAIN.name(self._run)) for row in record.rows]
            chain = max(chains, key=lambda chain: chain.number, default=RelayChain(0, (), (), "", 0))
            linked = [link.relay for link in chain.links]
            is_reported = all(
                relay in self.statuses and self.statuses[relay].chain_number == chain.number for relay in linked
            )
            return linked if is_reported and sorted(linked) == sorted(self.relays) and not chain.joining else []

        found: list[int] = self.until(order, "a chain of all that live")
        return found

    def weights(self, number: int) -> set[bytes]:
        """The distinct contents of version 1.`number` in the stores of live relays."""
        return {(self._roots[relay] / f"1.{number}.safetensors").read_bytes() for relay in self.relays}

    def reject_strangers(self) -> None:
        """Every relay rejects a local user who knows the run's name; its token is private to the owner."""
        secret = load_config(self._config).run_folder / "relay.secret"
        assert secret.stat().st_mode & 0o777 == 0o600
        for status in self.statuses.values():
            with pytest.raises(HandshakeRejected, match="the token is not that of this run"):
                connect(status.address, self._run, "another-token-entirely", -1, 5.0)
            connect(status.address, self._run, read_secret(secret), -1, 5.0).close()

    def received(self, relay: int) -> int:
        return self.statuses[relay].received

    def _submit(self, pipeline: str, index: int) -> Command:
        name, root = f"{pipeline}-{index}", self._roots[index]
        arguments = (pipeline, str(self._config), "--index", str(index), "--set", f"relay.store={root}")
        return Command(self._command_server, self._here / name, "submit", *arguments)


@pytest.fixture
def tier(
    command_server: CommandServer, broker: Broker, run_id: str, model_folder: Path, tmp_path: Path
) -> Iterator[Tier]:
    with ExitStack() as stack:
        stack.callback(kill_processes_in, [tmp_path / name for name in _names()])
        yield Tier(stack, command_server, broker, f"{run_id}-{os.getpid()}", model_folder, tmp_path)


def _names() -> Sequence[str]:
    return ["placement-0", "trainer-0", *(f"relay-{index}" for index in range(3))]


def kill_during_broadcast(tier: Tier, victim: int, *, number: int, successor: int, again: int) -> None:
    """Kill `victim` while `successor` has a part of version 1.`number`: all receive it, at most `again` bytes twice."""
    size = tier.until(lambda: tier.newest, "a manifest").bytes
    before = tier.received(successor)
    tier.batch()
    tier.until_some_of(number, relay=successor)
    tier.kill(victim)
    tier.until_all_have(number)
    assert tier.received(successor) - before <= size + again
    assert len(tier.weights(number)) == 1


def starts_of(command: Command) -> int:
    """How often the role has been started."""
    return command.output().count(" of laminar.")


@pytest.mark.slow
def test_relays_deliver_weights_despite_kills(tier: Tier) -> None:
    tier.until_all_have(0)
    tier.reject_strangers()
    master, middle, last = tier.until_chain()
    assert master == 0  # it shares the trainer's store

    # Kill the middle relay during a broadcast: its successor continues with the next live relay.
    kill_during_broadcast(tier, middle, number=1, successor=last, again=2 * CHUNK)
    assert tier.until_chain() == [master, last]

    # Restart it: it fetches the missing version.
    tier.start(middle)
    tier.until_all_have(1)
    assert tier.until_chain() == [master, last, middle]

    # Its machine restarts, and its shared memory is empty: it fetches the weights again.
    tier.kill(middle)
    tier.lose_store(middle)
    tier.start(middle)
    tier.until_all_have(1)
    assert tier.until_chain() == [master, last, middle]

    # It loses its versions, then the whole folder, while it runs.
    tier.lose_files(middle)
    tier.until_all_have(1)
    tier.lose_store(middle)
    tier.until(lambda: middle in tier.emptied, "the relay without its folder")
    tier.until_all_have(1)
    assert starts_of(tier.relays[middle]) == 3  # none since
    assert tier.until_chain() == [master, last, middle]

    # Kill the master during a broadcast: another becomes master, and the trainer sends it the rest.
    kill_during_broadcast(tier, master, number=2, successor=last, again=4 * CHUNK)
    new_master, other = tier.until_chain()  # the one with the whole version, or the first in the chain
    assert {new_master, other} == {last, middle}

    # Kill the master between broadcasts: the trainer pushes the next version to the last relay.
    tier.kill(new_master)
    tier.batch()
    tier.until_all_have(3)
    assert tier.until_chain() == [other]

    assert {relay: starts_of(command) for relay, command in tier.relays.items()} == {
        other: 3 if other == middle else 1
    }  # it was killed twice
    assert [starts_of(command) for command in (tier.placement, tier.trainer)] == [1, 1]
    assert not any("Traceback" in command.output() for command in tier.commands)
