"""What one machine's relay is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infra.listening import is_loopback
from infra.store.chunks import MAX_CHUNK_BYTES
from infra.transport.relay_node import Endpoint
from infra.transport.throttle import Link
from infra.transport.tls import Tls

AUTO = "auto"
_MEGABYTE = 1_000_000
LEAST_TOKEN = 16


@dataclass(frozen=True)
class RelayConfig:
    """What a machine keeps of a run's weights, and where. Raises ValueError naming the field that does not fit."""

    store: str = AUTO
    """Folder of the machine's weight store; "auto": where `infra.store.ownership.place_store` says."""
    relay: int = 0
    """Number of the relay in its run."""
    keep_versions: int = 4
    """Complete versions that are kept, beside pinned ones. With fewer than max_staleness + 2, a trajectory that moves
    may have to start afresh."""
    heartbeat_s: float = 1.0
    """Seconds between heartbeats: a new version does not make one."""
    listen: str = "127.0.0.1"
    """Address at which other machines' relays ask for weights; for more than this machine, set token_file too."""
    port: int = 0
    """Port of it; 0: any free one, which the heartbeats tell."""
    advertise: str = ""
    """host:port at which others reach this relay, where that is not listen and port."""
    token_file: str = ""
    """A file whose first line is a secret (16 characters or more) that relays and trainer share; it is never sent."""
    certificate_file: str = ""
    """A PEM file with this machine's key and certificate for TLS between relays: `python -m infra.certificates`."""
    authority_file: str = ""
    """A PEM file with the certificate of the authority that issued those of all relays."""
    clear_text: bool = False
    """Whether other machines may be reached without TLS: only where the network itself encrypts and authenticates."""
    schedule: Literal["chain", "tree", "binomial"] = "chain"
    """How a version goes from the master to the other relays."""
    chunk_bytes: int = 8 << 20
    """Bytes that are checked and passed on at a time."""
    max_megabytes_per_s: float | None = None
    """What a relay may send and receive, each; None: what the network gives."""
    deltas: bool = True
    """Whether relays are sent what has changed, where that is shorter; on one machine alone nothing is sent at all."""

    def __post_init__(self) -> None:
        if not self.store:
            raise ValueError('store must be a folder, or "auto"')
        if self.relay < 0:
            raise ValueError(f"relay must not be negative, not {self.relay}")
        if self.keep_versions < 1:
            raise ValueError(f"keep_versions must be at least 1, not {self.keep_versions}")
        if not self.heartbeat_s > 0:
            raise ValueError(f"heartbeat_s must be positive, not {self.heartbeat_s}")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port must be 0 to 65535, not {self.port}")
        if self.advertise and not self.advertise.rpartition(":")[2].isdecimal():
            raise ValueError(f"advertise must be host:port, not {self.advertise!r}")
        if not self.token_file and not is_loopback(self.listen):
            raise ValueError(f"listen = {self.listen!r} lets strangers in: set token_file, the same on every machine")
        if bool(self.certificate_file) != bool(self.authority_file):
            raise ValueError("set both certificate_file and authority_file, or neither")
        if not is_loopback(self.listen) and not self.certificate_file and not self.clear_text:
            raise ValueError(
                f"listen = {self.listen!r} sends weights and KV in clear text: set certificate_file and authority_file "
                "(`python -m infra.certificates DIR` makes them), or clear_text = true where the network encrypts"
            )
        if not 1024 <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes must be 1024 to {MAX_CHUNK_BYTES}, not {self.chunk_bytes}")
        if self.max_megabytes_per_s is not None and not self.max_megabytes_per_s > 0:
            raise ValueError(f"max_megabytes_per_s must be positive, not {self.max_megabytes_per_s}")

    def token(self) -> str:
        """The shared secret, empty where there is none. Raises ValueError for a file without one."""
        if not self.token_file:
            return ""
        try:
            text = Path(self.token_file).read_text(encoding="utf-8").partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"token_file {self.token_file} cannot be read: {error}") from error
        if not text:
            raise ValueError(f"token_file {self.token_file} has no secret in its first line")
        if len(text) < LEAST_TOKEN:
            raise ValueError(
                f"the secret in token_file {self.token_file} has {len(text)} characters, at least {LEAST_TOKEN} are "
                f"needed: `openssl rand -hex 32 > {self.token_file}`"
            )
        return text

    def tls(self) -> Tls | None:
        """The files of TLS, checked; None where there are none. Raises ValueError for files that do not serve."""
        if not self.certificate_file:
            return None
        files = Tls(self.certificate_file, self.authority_file)
        files.check()
        return files

    def door(self) -> Endpoint:
        """Where the relay listens. Raises ValueError as `token` and `tls`."""
        return Endpoint(self.listen, self.port, self.advertise, self.token(), self.tls())

    def link(self) -> Link:
        """One direction of its network link."""
        rate = self.max_megabytes_per_s
        return Link(None if rate is None else rate * _MEGABYTE)
