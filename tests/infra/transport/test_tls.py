"""TLS between relays: who is not of the run's authority gets nothing, and what passes cannot be read or changed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from relays_here import Machine, chain_over, manifest_of, put, tell, until, weights

from infra.certificates import Authority, write_relay_files
from infra.files import write_private
from infra.transport import handshake, serving
from infra.transport.frames import TransportError, receive
from infra.transport.handshake import connect
from infra.transport.kv_transfer import KVTransfers
from infra.transport.relay_node import Endpoint
from infra.transport.tls import Tls
from schemas.records import PolicyVersion

TOKEN = "a-token-of-the-run"
VERSION = PolicyVersion(1, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    write_relay_files(folder)
    broker = Authority.of_files(folder / "ca.pem", folder / "ca.key").issue("broker", ("127.0.0.1",))
    write_private(folder / "broker.pem", broker)
    write_relay_files(folder / "another")
    return folder


@pytest.fixture(scope="module")
def tls(folder: Path) -> Tls:
    return Tls(str(folder / "relay.pem"), str(folder / "ca.pem"))


class Between:
    """Who stands between two relays: passes on what each says, keeps it, and may change what is answered."""

    def __init__(self, address: str, change_after: int | None = None) -> None:
        self.seen, self._change_after = bytearray(), change_after
        self._host, _, self._port = address.rpartition(":")
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection((self._host, int(self._port)))
                for source, target, answers in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pass, args=(source, target, answers), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if answers and self._change_after is not None and len(self.seen) > self._change_after:
                    data = bytes([*data[:-1], data[-1] ^ 1])
                self.seen += data
                target.sendall(data)
        for each in (source, target):
            each.close()


@pytest.fixture
def two(tls: Tls) -> Iterator[tuple[KVTransfers, KVTransfers]]:
    source, target = (KVTransfers("run", Endpoint(token=TOKEN, tls=tls), 1 << 22) for _ in range(2))
    yield source, target
    source.close()
    target.close()


def test_weights_arrive_over_tls(tls: Tls) -> None:
    relays = [Machine(number, token=TOKEN, tls=tls) for number in range(2)]
    try:
        data = weights(1)
        manifest = manifest_of("1.1", data)
        put(relays[0].store, manifest, data)
        chain_over(relays)
        tell(relays, manifest)
        until(lambda: relays[1].has("1.1"))
    finally:
        for each in relays:
            each.close()


def test_kv_passes_over_tls_and_cannot_be_read(two: tuple[KVTransfers, KVTransfers]) -> None:
    source, target = two
    secret = b"what nobody else may read " * 40_000
    parcel, between = source.offer(VERSION, 3, memoryview(secret)), Between(source.address)
    assert parcel is not None
    moved = target.fetch(replace(parcel, address=between.address))
    assert bytes(moved.result(20)) == secret
    between.close()
    assert len(between.seen) > len(secret)
    assert b"nobody else" not in between.seen


def test_what_is_changed_on_the_way_ends_the_transfer(two: tuple[KVTransfers, KVTransfers]) -> None:
    source, target = two
    parcel, between = source.offer(VERSION, 3, memoryview(bytes(1 << 20))), Between(source.address, 20_000)
    assert parcel is not None
    moved = target.fetch(replace(parcel, address=between.address))
    with pytest.raises(TransportError):
        moved.result(20)
    between.close()


@pytest.mark.parametrize("who", ["broker", "another authority", "clear text", "TLS, to one of clear text"])
def test_whoever_has_no_relay_certificate_gets_nothing(who: str, folder: Path, tls: Tls) -> None:
    theirs = {
        "broker": Tls(str(folder / "broker.pem"), str(folder / "ca.pem")),
        "another authority": Tls(str(folder / "another" / "relay.pem"), str(folder / "another" / "ca.pem")),
        "clear text": None,
        "TLS, to one of clear text": tls,
    }[who]
    machine = Machine(0, token=TOKEN, tls=None if who.startswith("TLS") else tls)
    try:
        with pytest.raises(TransportError):
            receive(connect(machine.node.address, "r", TOKEN, 1, 2.0, theirs))
    finally:
        machine.close()


def test_a_server_that_does_not_know_the_token_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = handshake._proves
    monkeypatch.setattr(handshake, "_proves", lambda proof, who, *rest: who == "client" or original(proof, who, *rest))
    machine = Machine(0, token="another-token-entirely")  # it lets everybody in
    try:
        with pytest.raises(TransportError, match="does not know the token"):
            connect(machine.node.address, "r", TOKEN, 1, 2.0)
    finally:
        machine.close()


def test_strangers_who_say_nothing_do_not_lock_peers_out() -> None:
    machine = Machine(0, token=TOKEN)
    host, _, port = machine.node.address.rpartition(":")
    strangers = []
    try:
        for _ in range(2 * serving.MAX_STRANGERS):
            strangers.append(socket.create_connection((host, int(port))))
        for _ in range(serving.MAX_CONNECTIONS // 2):
            connect(machine.node.address, "r", TOKEN, 1, 5.0).close()
        assert len(machine.node._server._strangers) <= serving.MAX_STRANGERS
    finally:
        for stranger in strangers:
            stranger.close()
        machine.close()


@pytest.mark.parametrize("over_tls", [True, False])
def test_a_handshake_that_drips_ends_in_time(over_tls: bool, tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 1.0)
    machine = Machine(0, token=TOKEN, tls=tls if over_tls else None)
    host, _, port = machine.node.address.rpartition(":")
    drips = b"\x16\x03\x01\x10\x00\x01" if over_tls else b"LMN1\x02"
    try:
        with socket.create_connection((host, int(port))) as stranger:
            for byte in drips + bytes(40):  # each within the time, all of them never
                try:
                    stranger.sendall(bytes([byte]))
                except OSError:
                    break
                time.sleep(0.5)
            else:
                pytest.fail("20 s later it is still listened to")
    finally:
        machine.close()


def test_files_that_do_not_serve_are_named(folder: Path) -> None:
    for certificate, authority in (("none.pem", "ca.pem"), ("ca.pem", "ca.pem"), ("relay.pem", "none.pem")):
        with pytest.raises(ValueError, match=r"relay\.certificate_file .*(none|ca)\.pem.* do not serve"):
            Tls(str(folder / certificate), str(folder / authority)).check()


def test_relay_files_are_made_once_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "it"
    before = {file.name: file.read_text() for file in write_relay_files(folder)}
    assert {file.name: file.read_text() for file in write_relay_files(folder)} == before
    (folder / "relay.pem").unlink()
    again = {file.name: file.read_text() for file in write_relay_files(folder)}
    assert again["ca.pem"] == before["ca.pem"]
    assert again["relay.pem"] != before["relay.pem"]
    assert all(file.stat().st_mode & 0o077 == 0 for file in folder.iterdir())
