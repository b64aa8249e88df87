"""Faults of a cluster and of the hosts of a run's roles, drawn from a seed, each with its measured effect.

A fault without a measured effect raises NoEffect, because it tests nothing.
"""

from __future__ import annotations

import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
from faults.cluster import PORT, Cluster
from faults.network import Network, Rule, within

from infra.processes import is_running

KINDS = ("partition", "one-way partition", "isolation", "delay", "loss", "bandwidth", "pause", "kill")
PROBES = 40


class NoEffect(AssertionError):
    """A fault had no measured effect."""


@dataclass(frozen=True)
class Injected:
    """An injected fault, with its target, duration and measured effect."""

    kind: str
    target: str
    seconds: float
    effect: str


class Nemesis:
    """Injects faults into the hosts of `network`. `restart` starts the process of a killed host."""

    def __init__(
        self,
        seed: int,
        network: Network,
        cluster: Cluster,
        process_of: Callable[[str], psutil.Process],
        restart: Callable[[str], None],
    ) -> None:
        self._rng = random.Random(seed)
        self._network, self._cluster, self._process_of, self._restart = network, cluster, process_of, restart
        self._brokers = list(cluster.names)
        self._roles = [name for name in network.hosts if name not in cluster.names]

    def inject(self, kind: str | None = None, host: str | None = None, seconds: float | None = None) -> Injected:
        """Inject one fault of `kind` on `host` for `seconds` (each drawn if None), and return when it has ended."""
        kind = kind or self._rng.choice(KINDS)
        host = host or self._rng.choice(self._roles if kind == "isolation" else self._brokers + self._roles)
        peer = self._rng.choice([name for name in self._brokers if name != host])
        seconds = self._rng.uniform(1.0, 5.0) if seconds is None else seconds
        began = time.monotonic()
        if kind in ("pause", "kill"):
            target, effect = host, self._pause(host, seconds) if kind == "pause" else self._kill(host, seconds)
        elif kind == "bandwidth":
            target, effect = host, self._bandwidth(host, seconds)
        elif kind == "isolation":
            rules = tuple(rule for each in self._brokers if each != host for rule in self._network.both(host, each))
            target, effect = f"{host} ↔ all brokers", self._cut(host, peer, rules, seconds)
        else:
            target = f"{host} {'→' if kind == 'one-way partition' else '↔'} {peer}"
            effect = self._on_link(kind, host, peer, seconds)
        return Injected(kind, target, round(time.monotonic() - began, 1), effect)

    def pause_between(self) -> None:
        """Wait between faults, so that the run recovers, at least in part."""
        time.sleep(self._rng.uniform(0.2, 3.0))

    def _on_link(self, kind: str, host: str, peer: str, seconds: float) -> str:
        rules = self._network.both(host, peer)
        if kind == "delay":
            return self._delay(host, peer, rules, seconds)
        if kind == "loss":
            return self._loss(host, peer, rules, seconds)
        return self._cut(host, peer, rules[:1] if kind == "one-way partition" else rules, seconds)

    def _cut(self, host: str, peer: str, harmed: tuple[Rule, ...], seconds: float) -> str:
        """Drop all packets of the links `harmed`, among them one between `host` and `peer`."""
        before = sum(rule.dropped for rule in harmed)
        with _changed(harmed, loss=1.0):
            answered = self._network.probe(host, peer, PORT)
            time.sleep(seconds)
        dropped = sum(rule.dropped for rule in harmed) - before
        if answered is not None or not dropped:
            raise NoEffect(f"partition of {host} and {peer}: a response after {answered} s, {dropped} packets dropped")
        return f"no response, {dropped} packets dropped"

    def _delay(self, host: str, peer: str, rules: tuple[Rule, ...], seconds: float) -> str:
        delay = self._rng.uniform(0.05, 0.4)
        with _changed(rules, delay_s=delay):
            answered = self._network.probe(host, peer, PORT, timeout_s=10.0)
            time.sleep(seconds)
        if answered is None or answered < 2 * delay:
            raise NoEffect(f"delay of {delay:.2f} s per direction: a response after {answered} s")
        return f"{delay * 1000:.0f} ms per direction, a response took {answered * 1000:.0f} ms"

    def _loss(self, host: str, peer: str, rules: tuple[Rule, ...], seconds: float) -> str:
        share = self._rng.uniform(0.1, 0.4)
        before = [(rule.dropped, rule.passed) for rule in rules]
        with _changed(rules, loss=share):
            until, probes = time.monotonic() + seconds, 0
            while time.monotonic() < until or (probes < PROBES and sum(r.dropped for r in rules) == before[0][0]):
                self._network.probe(host, peer, PORT, timeout_s=0.5)
                probes += 1
                time.sleep(0.05)
        dropped = sum(rule.dropped - old for rule, (old, _) in zip(rules, before, strict=True))
        passed = sum(rule.passed - old for rule, (_, old) in zip(rules, before, strict=True))
        if not dropped:
            raise NoEffect(f"loss of {share:.0%}: none of {passed} packets was dropped")
        return f"{share:.0%} configured, {dropped} of {dropped + passed} packets dropped"

    def _bandwidth(self, host: str, seconds: float) -> str:
        kbit = self._rng.randint(2_000, 8_000)
        peer = self._network.hosts[self._rng.choice([name for name in self._brokers if name != host])]
        self._network.limit(host, kbit)
        try:

            def flood() -> None:
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                    for _ in range(16):
                        try:
                            sender.sendto(bytes(50_000), (peer.address, 9))
                        except OSError:
                            continue  # no process listens there; only the interface's limit matters

            within(self._network.hosts[host], flood)
            time.sleep(seconds)
        finally:
            held_back = self._network.limit(host, None)
        if not held_back:
            raise NoEffect(f"bandwidth of {kbit} kbit/s: no packet was held back")
        return f"{kbit} kbit/s, packets held back {held_back} times"

    def _pause(self, host: str, seconds: float) -> str:
        process = self._process_of(host)
        process.suspend()
        try:
            time.sleep(0.5)  # its threads stop one after the other
            before = process.cpu_times()
            time.sleep(seconds * 2)
            after, status = process.cpu_times(), process.status()
        finally:
            process.resume()
        if status != psutil.STATUS_STOPPED or after.user - before.user > 0.05:
            raise NoEffect(f"pause of {host}: {status}, {after.user - before.user:.2f} s of CPU time during the pause")
        return f"stopped for {seconds * 2:.1f} s"

    def _kill(self, host: str, seconds: float) -> str:
        process = self._process_of(host)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        time.sleep(seconds / 2)
        self._restart(host)
        new = self._process_of(host)
        if is_running(process) or new.pid == process.pid:
            raise NoEffect(f"kill of {host}: process {process.pid} is still there")
        return f"process {process.pid} killed, {new.pid} started"


@contextmanager
def _changed(rules: tuple[Rule, ...], **changes: float) -> Iterator[None]:
    """Change the values of `rules` during the block."""
    for rule in rules:
        for name, value in changes.items():
            setattr(rule, name, value)
    try:
        yield
    finally:
        for rule in rules:
            for name in changes:
                setattr(rule, name, 0.0)
