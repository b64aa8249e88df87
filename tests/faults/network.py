"""Hosts as network namespaces on a private network; every packet passes a switch that can delay or drop it.

Each host has one TUN interface, whose other end this process reads. So this process implements and counts partitions,
delays and losses between two hosts, without optional kernel modules. Bandwidth is limited by `tc tbf`. Raises NoNetwork
if namespaces cannot be created (not root, or not allowed).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

MTU = 65_000
"""Large, hence few packets: each costs this process some microseconds."""
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN_NO_PI = 0x400454CA, 0x1001

T = TypeVar("T")


class NoNetwork(RuntimeError):
    """Network namespaces cannot be used; the message has the reason."""


@dataclass(frozen=True)
class Host:
    """A network namespace with one address."""

    name: str
    namespace: str
    address: str


@dataclass
class Rule:
    """The delay and loss of packets from one host to another, and their counts."""

    delay_s: float = 0.0
    loss: float = 0.0
    delayed: int = 0
    dropped: int = 0
    passed: int = 0


class Network:
    """Hosts by name. `rules[source, destination]` are read for every packet and may be changed at any time."""

    def __init__(self, names: Sequence[str], seed: int = 0, net: str = "198.18.77") -> None:
        prefix = f"lam{os.getpid()}"
        self.hosts = {name: Host(name, f"{prefix}-{name}", f"{net}.{n}") for n, name in enumerate(names, 1)}
        self.rules: dict[tuple[str, str], Rule] = {}
        self.packets: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._descriptors: dict[str, int] = {}
        self._wake = os.pipe()
        self._thread = threading.Thread(target=self._switch, name="switch", daemon=True)

    def __enter__(self) -> Network:
        try:
            for host in self.hosts.values():
                _ip("netns", "add", host.namespace)
                self._descriptors[host.name] = within(host, _open_tun)
                _ip("-n", host.namespace, "link", "set", "lo", "up")
                _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "net0")
                _ip("-n", host.namespace, "link", "set", "net0", "mtu", str(MTU), "up")
        except (OSError, NoNetwork) as error:
            self._delete()
            raise NoNetwork(f"network namespaces cannot be used here (they need root): {error}") from error
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.write(self._wake[1], b"x")
        self._thread.join()
        self._delete()

    @property
    def switch_seconds(self) -> float:
        """CPU seconds of the switch so far, while it runs. It has one thread, so it uses at most one core."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def command(self, host: str, *command: str) -> list[str]:
        """The command line that runs `command` on `host`."""
        return [shutil.which("ip") or "ip", "netns", "exec", self.hosts[host].namespace, *command]

    def rule(self, source: str, destination: str) -> Rule:
        """The rule for packets from `source` to `destination`; changes apply at once."""
        return self.rules.setdefault((source, destination), Rule())

    def both(self, one: str, other: str) -> tuple[Rule, Rule]:
        """The rules of both directions between two hosts."""
        return self.rule(one, other), self.rule(other, one)

    def limit(self, host: str, kbit: int | None) -> int:
        """Limit what `host` sends to `kbit` kbit/s (None: no limit); return the old limit's overlimits count."""
        namespace = self.hosts[host].namespace
        shown = subprocess.run(
            ["tc", "-n", namespace, "-s", "qdisc", "show", "dev", "net0"], capture_output=True, text=True, check=True
        ).stdout
        subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", "net0", "root"], capture_output=True, check=False)
        if kbit is not None:
            rate = ["rate", f"{kbit}kbit", "burst", str(2 * MTU), "latency", "400ms"]
            subprocess.run(["tc", "-n", namespace, "qdisc", "add", "dev", "net0", "root", "tbf", *rate], check=True)
        words = shown.replace(",", "").split()
        return int(words[words.index("overlimits") + 1]) if "overlimits" in words else 0

    def probe(self, source: str, destination: str, port: int, timeout_s: float = 1.0) -> float | None:
        """Seconds until a TCP connection between two hosts is made or refused; None without a response."""
        address = (self.hosts[destination].address, port)

        def connect() -> float | None:
            began = time.monotonic()
            try:
                socket.create_connection(address, timeout_s).close()
            except ConnectionRefusedError:
                pass
            except OSError:
                return None
            return time.monotonic() - began

        return within(self.hosts[source], connect)

    def _switch(self) -> None:
        names = {host.address: host.name for host in self.hosts.values()}
        readers = {descriptor: name for name, descriptor in self._descriptors.items()}
        late: list[tuple[float, int, str, bytes]] = []
        number = 0
        while True:
            wait = max(0.0, late[0][0] - time.monotonic()) if late else None
            ready, _, _ = select.select([*readers, self._wake[0]], [], [], wait)
            if self._wake[0] in ready:
                return
            now = time.monotonic()
            while late and late[0][0] <= now:
                _, _, destination, packet = heapq.heappop(late)
                self._deliver(destination, packet)
            for descriptor in ready:
                source = readers[descriptor]
                for packet in _packets(descriptor):
                    to = names.get(socket.inet_ntoa(packet[16:20])) if packet[0] >> 4 == 4 else None
                    if to is None:
                        continue
                    rule = self.rules.get((source, to))
                    if rule is not None and rule.loss and self._random.random() < rule.loss:
                        rule.dropped += 1
                    elif rule is not None and rule.delay_s:
                        rule.delayed += 1
                        number += 1
                        heapq.heappush(late, (now + rule.delay_s, number, to, packet))
                    else:
                        if rule is not None:
                            rule.passed += 1
                        self._deliver(to, packet)

    def _deliver(self, destination: str, packet: bytes) -> None:
        self.packets[destination] += 1
        with contextlib.suppress(OSError):  # its queue is full or it is down: the packet is lost
            os.write(self._descriptors[destination], packet)

    def _delete(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        for end in self._wake:
            os.close(end)
        self._descriptors.clear()
        for host in self.hosts.values():
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)


def within(host: Host, work: Callable[[], T]) -> T:
    """Run `work` on `host`: its sockets, and those of threads that it starts, are in the host's namespace."""

    def enter() -> None:
        namespace = os.open(f"/run/netns/{host.namespace}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {host.namespace}")
        finally:
            os.close(namespace)

    # A pool of one thread: the thread and its namespace end with the block.
    with ThreadPoolExecutor(1, thread_name_prefix=f"in {host.name}") as pool:
        pool.submit(enter).result()
        outcome = pool.submit(work)
    return outcome.result()


def _packets(descriptor: int) -> list[bytes]:
    """Up to 64 waiting packets, so that other hosts are served too."""
    packets: list[bytes] = []
    try:
        while len(packets) < 64:
            packets.append(os.read(descriptor, MTU + 100))
    except BlockingIOError:
        pass
    return packets


def _open_tun() -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", b"net0", _IFF_TUN_NO_PI))
    return descriptor


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise NoNetwork("the command `ip` (iproute2) is not installed") from error
    if done.returncode:
        raise NoNetwork(f"ip {' '.join(words)}: {done.stderr.strip()}")
