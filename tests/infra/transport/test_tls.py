"""TLS between relays: only certificates of the run's authority are accepted; traffic cannot be read or changed."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from relays_here import TOKEN, Machine, chain_over, configure, manifest_of, store_version, until, weights

from infra.certificates import Authority, write_relay_files
from infra.files import write_private
from infra.transport import handshake, serving
from infra.transport.endpoint import Endpoint
from infra.transport.frames import TransportError, receive
from infra.transport.handshake import connect
from infra.transport.kv_transfer import KVTransfers
from infra.transport.tls import Tls, end_tls, tls_handshake
from schemas.records import PolicyVersion
from schemas.release import FIRST, NEWEST, write_for

VERSION = PolicyVersion(1, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    write_relay_files(folder)
    broker = Authority.load(folder / "ca.pem", folder / "ca.key").issue("broker", ("127.0.0.1",))
    write_private(folder / "broker.pem", broker)
    write_relay_files(folder / "another")
    return folder


@pytest.fixture(scope="module")
def tls(folder: Path) -> Tls:
    return Tls(str(folder / "relay.pem"), str(folder / "ca.pem"))


class RecordingProxy:
    """A proxy that forwards and records the traffic between two ends, and may change responses."""

    def __init__(self, address: str, change_after: int | None = None) -> None:
        self.recorded, self._change_after = bytearray(), change_after
        self._host, _, self._port = address.rpartition(":")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((self._host, int(self._port)))
                for source, target, is_response in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._forward, args=(source, target, is_response), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_response: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if is_response and self._change_after is not None and len(self.recorded) > self._change_after:
                    data = bytes([*data[:-1], data[-1] ^ 1])
                self.recorded += data
                target.sendall(data)
        for each in (source, target):
            each.close()


@pytest.fixture
def transfers(tls: Tls) -> Iterator[tuple[KVTransfers, KVTransfers]]:
    source, target = (KVTransfers("run", Endpoint(token=TOKEN, tls=tls), 1 << 22) for _ in range(2))
    yield source, target
    source.close()
    target.close()


def test_weights_are_transferred_over_tls(tls: Tls) -> None:
    relays = [Machine(number, token=TOKEN, tls=tls) for number in range(2)]
    try:
        data = weights(1)
        manifest = manifest_of("1.1", data)
        store_version(relays[0].store, manifest, data)
        chain_over(relays)
        configure(relays, manifest)
        until(lambda: relays[1].has("1.1"))
    finally:
        for each in relays:
            each.close()


@pytest.fixture
def old_machine(request: pytest.FixtureRequest, tls: Tls) -> Iterator[Machine]:
    """A relay that speaks protocol 3, which keeps TLS for the whole connection; the server decides."""
    write_for(FIRST)
    machine = Machine(0, token=TOKEN, tls=tls if request.param else None)
    yield machine
    write_for(NEWEST)
    machine.close()


@pytest.mark.parametrize("old_machine", [True, False], ids=["TLS", "no TLS"], indirect=True)
def test_relay_of_the_first_release_is_understood(old_machine: Machine) -> None:
    encryption = old_machine.node._endpoint.tls
    with connect(old_machine.node.address, "r", TOKEN, 1, 5.0, encryption) as connection:
        assert isinstance(connection, ssl.SSLSocket) == (encryption is not None)
    other, data = Machine(1, token=TOKEN, tls=encryption), weights(1)
    manifest = manifest_of("1.1", data)
    store_version(old_machine.store, manifest, data)
    try:
        chain_over([old_machine, other])
        configure([old_machine, other], manifest)
        until(lambda: other.has("1.1"))
    finally:
        other.close()


def test_kv_over_tls_cannot_be_read(transfers: tuple[KVTransfers, KVTransfers]) -> None:
    source, target = transfers
    secret = b"what nobody else may read " * 40_000
    manifest, proxy = source.offer(VERSION, 3, memoryview(secret)), RecordingProxy(source.address)
    assert manifest is not None
    moved = target.fetch(replace(manifest, address=proxy.address))
    assert bytes(moved.result(20)) == secret
    proxy.close()
    assert len(proxy.recorded) > len(secret)
    assert b"nobody else" not in proxy.recorded


class CertifiedProxy(RecordingProxy):
    """A proxy with a relay's certificate: both ends complete their TLS handshake with it, and it records what they send
    within TLS and after it. It does not know the run's token."""

    def __init__(self, address: str, tls: Tls) -> None:
        self._tls = tls
        super().__init__(address)

    def _serve(self) -> None:
        with suppress(OSError):
            near = self._tls.wrap_server(self._listener.accept()[0])
            far = self._tls.wrap_client(socket.create_connection((self._host, int(self._port))))
            for each in (near, far):
                tls_handshake(each, 10)
            for source, target in ((far, near), (near, far), (far, near)):  # challenge, hello, welcome
                data = source.recv(1 << 16)
                self.recorded += data
                target.sendall(data)
            ended = [threading.Thread(target=end_tls, args=(each,), daemon=True) for each in (near, far)]
            for thread in ended:
                thread.start()
            for thread in ended:
                thread.join(10)
            threading.Thread(target=super()._forward, args=(near, far, False), daemon=True).start()
            super()._forward(far, near, True)


def test_relay_certificate_without_the_token_reads_nothing(
    transfers: tuple[KVTransfers, KVTransfers], tls: Tls
) -> None:
    """A man in the middle who has stolen a certificate passes the proofs of the token on."""
    source, target = transfers
    secret = b"what nobody else may read " * 40_000
    manifest, proxy = source.offer(VERSION, 3, memoryview(secret)), CertifiedProxy(source.address, tls)
    assert manifest is not None
    moved = target.fetch(replace(manifest, address=proxy.address))
    assert bytes(moved.result(20)) == secret
    proxy.close()
    assert b'"proof"' in proxy.recorded  # it has read what the ends sent within TLS
    assert len(proxy.recorded) > len(secret)
    assert b"nobody else" not in proxy.recorded


def test_kv_over_tls_fails_when_it_is_changed(transfers: tuple[KVTransfers, KVTransfers]) -> None:
    source, target = transfers
    manifest, proxy = source.offer(VERSION, 3, memoryview(bytes(1 << 20))), RecordingProxy(source.address, 20_000)
    assert manifest is not None
    moved = target.fetch(replace(manifest, address=proxy.address))
    with pytest.raises(TransportError):
        moved.result(20)
    proxy.close()


@pytest.mark.parametrize("client_kind", ["broker", "another authority", "clear text", "TLS, to one of clear text"])
def test_connect_fails_without_a_relay_certificate(
    client_kind: str, folder: Path, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    if client_kind == "clear text":  # the server waits so long for a handshake
        monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.5)
    theirs = {
        "broker": Tls(str(folder / "broker.pem"), str(folder / "ca.pem")),
        "another authority": Tls(str(folder / "another" / "relay.pem"), str(folder / "another" / "ca.pem")),
        "clear text": None,
        "TLS, to one of clear text": tls,
    }[client_kind]
    machine = Machine(0, token=TOKEN, tls=None if client_kind.startswith("TLS") else tls)
    try:
        with pytest.raises(TransportError):
            receive(connect(machine.node.address, "r", TOKEN, 1, 2.0, theirs))
    finally:
        machine.close()


def test_connect_fails_when_the_server_lacks_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    original = handshake._proves
    monkeypatch.setattr(
        handshake,
        "_proves",
        lambda proof, number, role, *rest: role == "client" or original(proof, number, role, *rest),
    )
    machine = Machine(0, token="another-token-entirely")  # it accepts every client
    try:
        with pytest.raises(TransportError, match="does not know the token"):
            connect(machine.node.address, "r", TOKEN, 1, 2.0)
    finally:
        machine.close()


def test_silent_connections_do_not_block_peers() -> None:
    machine = Machine(0, token=TOKEN)
    host, _, port = machine.node.address.rpartition(":")
    clients = []
    try:
        for _ in range(2 * serving.MAX_UNAUTHENTICATED):
            clients.append(socket.create_connection((host, int(port))))
        for _ in range(serving.MAX_CONNECTIONS // 2):
            connect(machine.node.address, "r", TOKEN, 1, 5.0).close()
        assert len(machine.node._server._unauthenticated) <= serving.MAX_UNAUTHENTICATED
    finally:
        for client in clients:
            client.close()
        machine.close()


@pytest.mark.parametrize("over_tls", [True, False])
def test_handshake_of_single_bytes_times_out(over_tls: bool, tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 1.0)
    machine = Machine(0, token=TOKEN, tls=tls if over_tls else None)
    host, _, port = machine.node.address.rpartition(":")
    first_bytes = b"\x16\x03\x01\x10\x00\x01" if over_tls else b"LMN1\x02"
    try:
        with socket.create_connection((host, int(port))) as client:
            for byte in first_bytes + bytes(40):  # each byte comes in time, the handshake never completes
                try:
                    client.sendall(bytes([byte]))
                except OSError:
                    break
                time.sleep(0.5)
            else:
                pytest.fail("the relay still accepts bytes after 20 s")
    finally:
        machine.close()


def test_tls_check_names_invalid_files(folder: Path) -> None:
    for certificate, authority in (("none.pem", "ca.pem"), ("ca.pem", "ca.pem"), ("relay.pem", "none.pem")):
        with pytest.raises(ValueError, match=r"relay\.certificate_file .*(none|ca)\.pem.* cannot be used"):
            Tls(str(folder / certificate), str(folder / authority)).check()


def test_relay_files_are_created_once_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "it"
    before = {file.name: file.read_text() for file in write_relay_files(folder)}
    assert {file.name: file.read_text() for file in write_relay_files(folder)} == before
    (folder / "relay.pem").unlink()
    again = {file.name: file.read_text() for file in write_relay_files(folder)}
    assert again["ca.pem"] == before["ca.pem"]
    assert again["relay.pem"] != before["relay.pem"]
    assert all(file.stat().st_mode & 0o077 == 0 for file in folder.iterdir())
