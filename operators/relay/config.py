"""The configuration of a relay, section `[relay]`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le

from infra.files import read_secret
from infra.listening import host_of, is_loopback, is_unspecified, own_address_towards
from infra.setting_types import CheckedSettings, NonNegative, NonNegativeInt, Port, Positive, PositiveInt
from infra.storage import StorageFolder, check_storage, open_storage
from infra.store.chunks import MAX_CHUNK_BYTES
from infra.transport.endpoint import Endpoint
from infra.transport.throttle import Link
from infra.transport.tls import Tls

AUTO = "auto"
_MEGABYTE = 1_000_000


@dataclass(frozen=True)
class RelayConfig(CheckedSettings):
    """Which weight versions a machine stores, where, and how it transfers them. Raises ValueError naming the field."""

    store: str = AUTO
    """Folder of the machine's weight store. "auto": in shared memory (/dev/shm) where it is large enough, otherwise in
    the run's folder, with a warning."""
    relay: NonNegativeInt = 0
    """Number of the relay in its run."""
    keep_versions: PositiveInt = 4
    """Complete versions that are kept, in addition to pinned ones. With fewer than max_staleness + 2 a moved trajectory
    may have to restart."""
    disk_folder: str = ""
    """A folder on this machine's disk for copies of its newest versions, each run in a folder of its own. A relay whose
    memory is empty, as after a reboot or in a new pod, starts from them, and fetches what has changed. Empty: none."""
    disk_versions: PositiveInt = 1
    """Copies that `disk_folder` keeps; while one is written there is one more."""
    object_store: str = ""
    """A folder in an object store (`s3://bucket/folder`), or one that all machines mount, for copies of the newest
    versions, each run in a folder of its own. The master relay writes them; a relay reads there what no other relay
    gives it. Credentials come from the environment. Empty: none."""
    object_store_versions: PositiveInt = 1
    """Copies that `object_store` keeps; while one is written there is one more."""
    object_store_every_s: NonNegative = 600.0
    """Seconds between the beginnings of two copies: a version takes the time of its upload, and its money."""
    heartbeat_s: Positive = 1.0
    """Seconds between heartbeats; a new version does not trigger one. At most a third of
    placement.heartbeat_timeout_s."""
    listen: str = "127.0.0.1"
    """Address at which the relays of other machines request weights; beyond loopback token_file is required."""
    port: Port = 0
    """Port to listen at; 0: any free port, which the heartbeats report."""
    advertise: str = ""
    """host:port at which other machines reach this relay. Empty: the port it listens at, with the address in `listen`,
    or for 0.0.0.0 with this machine's address on the way to Kafka."""
    token_file: str = ""
    """A file whose first line is a secret (at least 16 characters) shared by relays, rollouts and trainer; it is never
    sent. Empty: one that the run creates in its folder, `relay.secret`."""
    certificate_file: str = ""
    """A PEM file with this machine's key and certificate for TLS between relays: `python -m infra.certificates`."""
    authority_file: str = ""
    """A PEM file with the certificate of the authority that issued the certificates of all relays."""
    clear_text: bool = False
    """Whether to connect to other machines without TLS: only if the network itself encrypts and authenticates."""
    schedule: Literal["chain", "tree", "binomial"] = "chain"
    """Schedule by which a version is sent from the master to the other relays."""
    chunk_bytes: Annotated[int, Ge(1024), Le(MAX_CHUNK_BYTES)] = 8 << 20
    """Bytes of a chunk, the unit that is verified and forwarded."""
    max_megabytes_per_s: Positive | None = None
    """Rate limit of a relay for sending and for receiving, each; unset: unlimited."""
    deltas: bool = True
    """Whether relays get deltas where those are shorter; with a single machine nothing is transferred."""

    def _check(self) -> None:
        if not self.store:
            raise ValueError('store must be a folder, or "auto"')
        check_storage("object_store", self.object_store)
        host, _, port = self.advertise.rpartition(":")
        if self.advertise and not (host.strip("[]") and port.isdecimal() and 1 <= int(port) <= 65535):
            raise ValueError(f"advertise must be host:port, with a port from 1 to 65535, not {self.advertise!r}")
        if bool(self.certificate_file) != bool(self.authority_file):
            raise ValueError("set both certificate_file and authority_file, or neither")
        if not is_loopback(self.listen) and (lacking := " ".join(self._lacking_for_others())):
            raise ValueError(
                f"listen = {self.listen!r} accepts other machines: {lacking} (`python -m infra.certificates DIR` "
                "creates all three files; docs/deploy.md has the section to copy)"
            )

    def _lacking_for_others(self) -> Iterator[str]:
        if not self.token_file:
            yield "set the same token_file on all."
        if not self.certificate_file and not self.clear_text:
            yield (
                "Weights and KV are sent in clear text: set certificate_file and authority_file, or clear_text = true "
                "if the network encrypts."
            )

    def token(self) -> str:
        """The shared secret; empty without token_file, which no relay accepts: see `pipelines.shards.with_relay_token`.

        Raises ValueError for a file without a valid secret.
        """
        try:
            return read_secret(Path(self.token_file)) if self.token_file else ""
        except ValueError as error:
            raise ValueError(f"token_file: {error}") from error

    def tls(self) -> Tls | None:
        """The TLS files, checked; None if not configured. Raises ValueError for files that cannot be used."""
        if not self.certificate_file:
            return None
        files = Tls(self.certificate_file, self.authority_file)
        files.check()
        return files

    def endpoint(self, brokers: str) -> Endpoint:
        """The address, token and TLS files of the relay, on a machine that reaches Kafka at `brokers`.

        Raises ValueError as `token` and `tls`, and for an address that other machines cannot reach.
        """
        kafka = [host_of(each) for each in brokers.split(",")]
        advertised = self.advertise
        if not advertised and is_unspecified(self.listen):
            own = self._own_address(kafka)
            advertised = f"[{own}]:{self.port}" if ":" in own else f"{own}:{self.port}"
        host = host_of(advertised or self.listen)
        on_loopback = is_loopback(self.listen) or all(map(is_loopback, kafka))
        if is_unspecified(host) or (is_loopback(host) and not on_loopback):
            raise ValueError(f"advertise = {advertised!r} is no address that other machines can reach")
        return Endpoint(self.listen, self.port, advertised, self.token(), self.tls())

    def _own_address(self, hosts: Iterable[str]) -> str:
        """This machine's address on the way to the first of Kafka's `hosts` to which there is one: a broker that is
        being restarted may have no address. Raises ValueError if there is no way to any."""
        failures = []
        for host in hosts:
            try:
                return own_address_towards(host)
            except OSError as error:
                failures.append(f"{host} ({error.strerror})")
        raise ValueError(
            f"listen = {self.listen!r}: this machine's own address is unknown, because there is no way to Kafka at "
            f"{', '.join(failures)}; set relay.advertise"
        )

    def copies_folder(self, run: str) -> Path | None:
        """The folder of this relay's copies of the weights of `run`; None without `disk_folder`."""
        return Path(self.disk_folder) / run / f"relay-{self.relay}" if self.disk_folder else None

    def objects_folder(self, run: str) -> StorageFolder | None:
        """The folder of the copies of the weights of `run` that all its relays read; None without `object_store`."""
        return open_storage(self.object_store) / run if self.object_store else None

    def link(self) -> Link:
        """One direction of the relay's network link."""
        rate = self.max_megabytes_per_s
        return Link(None if rate is None else rate * _MEGABYTE)
