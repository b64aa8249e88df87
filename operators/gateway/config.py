"""The configuration of the gateway, section `[gateway]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from infra.listening import is_host, is_loopback, is_unspecified
from infra.setting_types import CheckedSettings, FinitePositive, NonNegativeInt, Port, PositiveInt
from schemas.records import Branches


@dataclass(frozen=True)
class GatewayConfig(CheckedSettings):
    """The HTTP endpoint of agents. Raises ValueError naming the field that is invalid."""

    host: str = "127.0.0.1"
    """Address at which the gateway listens; beyond loopback certificate_file and key_file are required."""
    advertise: str = ""
    """Host name, in the certificate, under which agents reach the gateway. Empty: `host`, so agents of the run itself
    need one if that is 0.0.0.0. In the containers of `laminar deploy` it is for agents elsewhere alone."""
    port: Port = 0
    """Port to listen at; 0: any free port, the same at every start of the run, see `gateway.json` in its folder."""
    processes: PositiveInt = 1
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
    branches: Branches = "last"
    """Which conversations of an episode are trained, each with its own reward, else the episode's: `last`, that of the
    last turn; `all`, every one, tokens that several have in common once; `tree`, every one whole, so that a token
    counts once for each conversation that follows from it. At most 64, the newest, which together have no more tokens
    than the model's context, or than trainer.learner.micro_batch_tokens if that is more, nor than
    experience.micro_batch_tokens; the newest is trained in any case."""
    serve_requests: NonNegativeInt = 4
    """Requests of people that run at once under any weight version of this machine (`laminar chat`): in a process of
    low priority on the CPU, so that training does not wait for them. 0: none are answered."""
    serve_threads: PositiveInt = 1
    """CPU threads of that process."""
    max_body_bytes: PositiveInt = 8_000_000
    """Maximum bytes of a request."""
    max_requests: PositiveInt = 1024
    """Requests that may be in progress in one process; others get status 429."""
    turn_timeout_s: FinitePositive = 600.0
    """A request whose episode gets no tokens for so many seconds gets status 504; a repeated request waits on."""

    def _check(self) -> None:
        if bool(self.certificate_file) != bool(self.key_file):
            raise ValueError("certificate_file and key_file: set both or neither")
        if self.advertise and (not is_host(self.advertise) or is_unspecified(self.advertise)):
            raise ValueError(f"advertise must be a host name or address, without a port, not {self.advertise!r}")
        if is_loopback(self.host) and self.advertise and not is_loopback(self.advertise):
            raise ValueError(
                f"agents of other machines cannot connect at host {self.host!r}: set host, too, for advertise = "
                f"{self.advertise!r}"
            )
        if not is_loopback(self.host) and not self.certificate_file:
            raise ValueError(
                f"other machines can reach host {self.host!r}: set certificate_file and key_file "
                "(without TLS anybody on the network can read the keys of episodes)"
            )
