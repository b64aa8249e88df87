"""Relays, each with a memory of its own as on machines apart, under a real placement and a real trainer: whoever is
killed, the weights arrive, nobody is restarted, and nothing that had arrived is sent again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from laminar_runs import Command, Nursery, kill_what_lives_in
from small_runs import SMALL
from trainer_batches import make_batch

from infra.kafka.broker import Broker
from infra.kafka.observer import Observer
from infra.kafka.producer import BoundedProducer
from infra.kafka.topic_reader import read_topic
from infra.store.names import default_root
from infra.store.ownership import remove_store
from pipelines.config import load_config
from pipelines.run.topics import make_topics
from schemas.codec import encode
from schemas.records import RelayChain, RelayStatus, WeightVersion
from schemas.topics import BATCHES, RELAY_CHAIN

CHUNK = 64 << 10
PACE = 1.5
"""10^6 bytes a second on each link: a version of the small model takes two seconds, in which somebody can be killed."""


class Tier:
    """Placement, a trainer and relays 0, 1, 2; relay 0 has the trainer's memory. `batch` makes the next version."""

    def __init__(self, opened: ExitStack, nursery: Nursery, broker: Broker, run: str, model: Path, here: Path) -> None:
        self._nursery, self._here, self._run = nursery, here, run
        self._roots = [default_root(f"{run}-machine-{index}") for index in range(3)]
        for root in self._roots:
            opened.callback(remove_store, root, in_use=True)
        known = {
            "run": {"name": run, "folder": str(here / "runs")},
            "kafka": {"bootstrap_servers": broker.bootstrap_servers},
            "model": {"path": str(model)},
            "trainer": {"optimizer_steps": 99, "checkpoint_every": 99},
            "placement": {"heartbeat_timeout_s": 5.0},
            "relay": {"heartbeat_s": 0.1, "chunk_bytes": CHUNK, "max_megabytes_per_s": PACE, "deltas": False},
        }
        self._config = here / "config.toml"
        self._config.write_text(tomli_w.dumps({**SMALL, **known}))
        self._client = load_config(self._config).kafka.client()
        make_topics(load_config(self._config))
        self._observer = opened.enter_context(Observer(self._client, run))
        self._producer = BoundedProducer(self._client)
        opened.callback(self._producer.close)
        self._batches = 0
        self.said: dict[int, RelayStatus] = {}
        self._in_part: set[tuple[int, str]] = set()
        """Relays that have said to have part of a version."""
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
        self.relays.pop(relay).end()
        del self.said[relay]

    def batch(self) -> None:
        for part in make_batch(self._batches, number=self._batches):
            value, headers = encode(part)
            self._producer.send(BATCHES.name(self._run), value, headers=headers, partition=0)
        self._producer.flush(10)
        self._batches += 1

    def until(self, what: Callable[[], Any], why: str) -> Any:
        """The first true answer of `what`, while heartbeats come in and nobody ends."""
        for _ in range(600):
            if answer := what():
                return answer
            for row in self._observer.poll(0.1):
                if isinstance(row, RelayStatus) and row.relay in self.relays:
                    self.said[row.relay] = row
                    if 4 * CHUNK < row.arrived_bytes < row.arriving_bytes // 2:
                        self._in_part.add((row.relay, str(row.arriving)))
                elif isinstance(row, WeightVersion):
                    self.newest = row
            ended = [command for command in self.commands if command.exit_code() is not None]
            assert not ended, "\n".join(command.said()[-3000:] for command in ended)
        logs = "\n".join(command.said()[-3000:] for command in self.commands)
        raise AssertionError(f"{why}: it did not happen; relays say {self.said}\n{logs}")

    def until_all_have(self, number: int) -> None:
        """Wait until every relay that lives has version 1.`number`."""
        relays = self.relays
        everybody = lambda: all(f"1.{number}" in self.said[r].versions for r in relays if r in self.said)  # noqa: E731
        self.until(lambda: relays.keys() <= self.said.keys() and everybody(), f"version 1.{number} everywhere")

    def until_some_of(self, number: int, relay: int) -> None:
        """Wait until part of version 1.`number` is at `relay`."""
        self.until(lambda: (relay, f"1.{number}") in self._in_part, f"part of version 1.{number} at relay {relay}")

    def until_chain(self) -> list[int]:
        """The order of the relays that live, once all of them obey the same chain and have the newest version."""

        def order() -> list[int]:
            chains = [row for record in read_topic(self._client, RELAY_CHAIN.name(self._run)) for row in record.rows]
            chain = max(chains, key=lambda chain: chain.number, default=RelayChain(0, (), (), "", 0))
            linked = [link.relay for link in chain.links]
            told = all(relay in self.said and self.said[relay].chain_number == chain.number for relay in linked)
            return linked if told and sorted(linked) == sorted(self.relays) and not chain.joining else []

        found: list[int] = self.until(order, "a chain of all that live")
        return found

    def weights(self, number: int) -> set[bytes]:
        """The bytes of version 1.`number` at all relays that live."""
        return {(self._roots[relay] / f"1.{number}.safetensors").read_bytes() for relay in self.relays}

    def received(self, relay: int) -> int:
        return self.said[relay].received

    def _submit(self, pipeline: str, index: int) -> Command:
        name, root = f"{pipeline}-{index}", self._roots[index]
        words = (pipeline, str(self._config), "--index", str(index), "--set", f"relay.store={root}")
        return Command(self._nursery, self._here / name, "submit", *words)


@pytest.fixture
def tier(nursery: Nursery, broker: Broker, run_id: str, model_folder: Path, tmp_path: Path) -> Iterator[Tier]:
    with ExitStack() as opened:
        opened.callback(kill_what_lives_in, [tmp_path / name for name in _names()])
        yield Tier(opened, nursery, broker, f"{run_id}-{os.getpid()}", model_folder, tmp_path)


def _names() -> Sequence[str]:
    return ["placement-0", "trainer-0", *(f"relay-{index}" for index in range(3))]


def kill_during_broadcast(tier: Tier, victim: int, *, number: int, successor: int, again: int) -> None:
    """Kill `victim` while `successor` has part of version 1.`number`: all get it, and at most `again` bytes twice."""
    size = tier.until(lambda: tier.newest, "a manifest").bytes
    before = tier.received(successor)
    tier.batch()
    tier.until_some_of(number, relay=successor)
    tier.kill(victim)
    tier.until_all_have(number)
    assert tier.received(successor) - before <= size + again
    assert len(tier.weights(number)) == 1


def test_relays_deliver_weights_despite_kills(tier: Tier) -> None:
    tier.until_all_have(0)
    master, middle, last = tier.until_chain()
    assert master == 0  # it has the trainer's memory

    # One in the middle, during a broadcast: its successor goes on with the next survivor.
    kill_during_broadcast(tier, middle, number=1, successor=last, again=2 * CHUNK)
    assert tier.until_chain() == [master, last]

    # It is back, and pulls what it lacks.
    tier.start(middle)
    tier.until_all_have(1)
    assert tier.until_chain() == [master, last, middle]

    # The master, during a broadcast: the next one is named, and what it lacks comes from the trainer.
    kill_during_broadcast(tier, master, number=2, successor=last, again=4 * CHUNK)
    heir, other = tier.until_chain()  # whoever had it whole when placement noticed, the first in the chain if both
    assert {heir, other} == {last, middle}

    # The master, between broadcasts: the one that is left is pushed the next version by the trainer.
    tier.kill(heir)
    tier.batch()
    tier.until_all_have(3)
    assert tier.until_chain() == [other]

    starts = {relay: command.said().count(" of laminar.") for relay, command in tier.relays.items()}
    assert starts == {other: 2 if other == middle else 1}  # it was killed
    assert [command.said().count(" of laminar.") for command in (tier.placement, tier.trainer)] == [1, 1]
    assert not any("Traceback" in command.said() for command in tier.commands)
