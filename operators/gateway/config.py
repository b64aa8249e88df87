"""The configuration of the gateway, section `[gateway]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from infra.listening import is_loopback


@dataclass(frozen=True)
class GatewayConfig:
    """The HTTP endpoint of agents. Raises ValueError naming the field that is invalid."""

    host: str = "127.0.0.1"
    """Address at which agents connect; beyond loopback certificate_file and key_file are required."""
    port: int = 0
    """Port to listen at; 0: any free port, the same at every start of the run, see `gateway.json` in its folder."""
    processes: int = 1
    """Gateway processes, which share the port: while one restarts, the others answer."""
    template: Literal["auto", "chat", "plain"] = "auto"
    """How messages become tokens: by the model's chat template, or `plain`, their contents one after another. `auto`:
    the chat template, if the model has one."""
    secret_file: str = ""
    """A file whose first line is a secret (at least 16 characters), from which the keys of episodes are derived; empty:
    one in the run's folder."""
    certificate_file: str = ""
    """The TLS certificate (PEM)."""
    key_file: str = ""
    """The certificate's key (PEM)."""
    max_body_bytes: int = 8_000_000
    """Maximum bytes of a request."""
    max_requests: int = 1024
    """Requests that may be in progress in one process; others get status 429."""
    turn_timeout_s: float = 600.0
    """A request without a response for so many seconds gets status 504; a repeated request continues to wait."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, not {self.port}")
        for name in ("processes", "max_body_bytes", "max_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.turn_timeout_s < float("inf"):
            raise ValueError(f"turn_timeout_s must be positive, not {self.turn_timeout_s}")
        if bool(self.certificate_file) != bool(self.key_file):
            raise ValueError("certificate_file and key_file: set both or neither")
        if not is_loopback(self.host) and not self.certificate_file:
            raise ValueError(
                f"other machines can reach host {self.host!r}: set certificate_file and key_file "
                "(without TLS anybody on the network can read the keys of episodes)"
            )
