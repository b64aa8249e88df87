"""Listening sockets of processes: loopback addresses, and addresses that other machines can reach."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

import psutil


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_unspecified(host: str) -> bool:
    """Whether `host` stands for all addresses of a machine (0.0.0.0, ::): one can listen there, not connect."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def is_host(text: str) -> bool:
    """Whether `text` is an address, or has the form of a host name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return re.fullmatch(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?", text) is not None
    return True


def host_of(address: str) -> str:
    """The host in `address`: "host:port", a URL, or only a host."""
    rest = address.partition("://")[2] or address
    rest = rest.partition("/")[0]
    if rest.startswith("["):
        return rest[1:].partition("]")[0]
    return rest if rest.count(":") > 1 else rest.partition(":")[0]


def resolved_address(host: str) -> str:
    """The address of `host`, at which a `listening_socket` listens. Raises OSError for an unknown name."""
    return str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])


def listening_socket(host: str) -> socket.socket:
    """A TCP socket that listens at `host` on a free port. Raises OSError if `host` is not of this machine."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, 0), family=family)


def port_problem(host: str, port: int) -> str | None:
    """Why no process can listen at `host` and `port` now; None if one can."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return None


def own_address_towards(host: str) -> str:
    """This machine's address on the way to `host`. Raises OSError if `host` is unknown or there is no route."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def interface_towards(host: str) -> str | None:
    """The network interface by which this machine reaches `host`; None if no interface has the source address."""
    own = own_address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == own for each in addresses):
            return name
    return "lo" if is_loopback(own) and "lo" in psutil.net_if_addrs() else None


def listening_sockets(processes: Iterable[psutil.Process]) -> set[tuple[str, int]]:
    """Address and port of each listening TCP and bound UDP socket of `processes`; ended processes are skipped."""
    found = set()
    for process in processes:
        try:
            connections = process.net_connections("inet")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        for each in connections:
            is_open = each.status == psutil.CONN_LISTEN or (each.type == socket.SOCK_DGRAM and not each.raddr)
            if is_open and each.laddr and each.laddr.port:
                found.add((each.laddr.ip.removeprefix("::ffff:"), each.laddr.port))
    return found


def exposed_addresses(sockets: Iterable[tuple[str, int]]) -> list[str]:
    """Those of `sockets` that other machines can reach, as "address:port"."""
    return sorted(f"{host}:{port}" for host, port in sockets if not is_loopback(host.partition("%")[0]))
