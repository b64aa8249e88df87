"""The address at which a relay serves others, and what it needs to serve them."""

from __future__ import annotations

from dataclasses import dataclass, field

from infra.transport.tls import Tls


@dataclass(frozen=True)
class Endpoint:
    """The address of a relay: it listens at `host`:`port` (0: any free port), others connect to `advertised`.

    An advertised port of 0 stands for the port at which the relay listens. No server starts without a token.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertised: str = ""
    token: str = field(default="", repr=False)
    tls: Tls | None = None

    def address_at(self, port: int) -> str:
        """The advertised address of a server of this host that listens at `port`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.advertised.rpartition(':')[0] or host}:{port}"

    def relay_address(self, port: int) -> str:
        """The advertised address of the relay itself, which listens at `port`."""
        return self.address_at(int(self.advertised.rpartition(":")[2] or 0) or port)
