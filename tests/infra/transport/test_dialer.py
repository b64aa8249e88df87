"""The dialer of a relay: addresses that do not work are named, for a while."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import pytest
from relays_here import RUN, TOKEN, Machine, configure, machines, manifest_of, store_version, until, weights

from infra.transport.chunked_blob import full_blob
from infra.transport.dialer import UNREACHABLE_S, Dialer
from infra.transport.endpoint import Endpoint
from infra.transport.frames import PeerUnreachable
from infra.transport.throttle import Link
from schemas.records import RelayLink

DATA = weights(3, 0.1)
MANIFEST = manifest_of("1.1", DATA)


@pytest.fixture
def closed_address() -> Iterator[str]:
    """An address at which nobody listens, and nobody else can."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


def test_dialer_names_unreachable_addresses_for_a_while(closed_address: str, caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    dialer = Dialer(RUN, 1, Endpoint(token=TOKEN), Link(), clock=lambda: now[0])
    link = RelayLink(7, closed_address, "node-7", "/store")
    memory = memoryview(bytearray(len(DATA)))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with pytest.raises(PeerUnreachable):
                dialer.dial(link, full_blob(MANIFEST), memory, False)
    assert dialer.unreachable() == (link.address,)
    (warning,) = caplog.messages  # one, however often it tries
    assert "relay 7 of machine node-7 cannot be reached" in warning
    assert "set relay.advertise there" in warning
    now[0] += UNREACHABLE_S
    assert dialer.unreachable() == ()


def test_relay_reports_an_address_until_it_works() -> None:
    with machines(2) as (source, target):
        store_version(source.store, MANIFEST, DATA)
        configure([source, target], MANIFEST)
        until(lambda: target.has("1.1"))
        assert target.node.unreachable() == ()
        source.node.close()
        configure([source, target], manifest_of("1.2", weights(4, 0.1)))
        until(lambda: target.node.unreachable() == (source.node.address,))
        again = Machine(source.relay, port=int(source.node.address.rpartition(":")[2]))
        try:
            newer = weights(4, 0.1)
            store_version(again.store, manifest_of("1.2", newer), newer)
            until(lambda: target.has("1.2"))
            assert target.node.unreachable() == ()
        finally:
            again.close()
