"""The address of a run's gateway and keys for it, for commands on the run's machine; requests over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import urllib.error
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit, urlunsplit

from infra.files import read_secret
from infra.http_client import post_json
from infra.listening import is_unspecified
from infra.machine import GATEWAY_URL, machine_name
from operators.io.episode_keys import ADDRESS_FILE, SECRET_FILE, SERVING_LOG, EpisodeKeys
from pipelines.config import Config, load_config
from pipelines.inspect.run_files import CONFIG_FILE, STATE_FILE
from pipelines.inspect.run_folders import config_file, laminar_command, read_run, run_command

ERROR_BYTES = 10_000
_ADVICE = "Is the run active, and does this machine reach that address (gateway.advertise)?"


class GatewayError(RuntimeError):
    """The gateway rejects a request, or does not respond. `status` is that of the response, 0 without one.

    `by_gateway`: the response has the shape of the gateway's errors, and is not of a proxy before it.
    """

    def __init__(self, message: str, status: int = 0, *, by_gateway: bool = False) -> None:
        super().__init__(message)
        self.status, self.by_gateway = status, by_gateway


@dataclass(frozen=True)
class GatewayAccess:
    """The base URL of a gateway, which ends in /v1, a key for it, and the log of the process that answers people."""

    url: str
    key: str
    log: Path | None = None

    @contextmanager
    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 600.0) -> Iterator[IO[bytes]]:
        """The response to `body` at `path`, whose lines can be read as they arrive. Raises GatewayError."""
        if not self.url.startswith(("http://", "https://")):
            raise GatewayError(f"{self.url} is not the URL of a gateway: it must begin with http:// or https://")
        try:
            with post_json(f"{self.url.rstrip('/')}/{path}", self.key, body, timeout_s) as response:
                yield response
        except urllib.error.HTTPError as error:
            with error:
                message = _message_in(error.read(ERROR_BYTES))
                raise GatewayError(message or str(error), error.code, by_gateway=bool(message)) from error
        except (OSError, http.client.HTTPException) as error:
            raise GatewayError(f"the gateway at {self.url} does not respond: {error}. {_ADVICE}") from error


def access_of(folder: Path | None, holder: str) -> GatewayAccess:
    """The access of `holder` (PEOPLE, WORKERS or an episode) to the gateway of the run in `folder`.

    Raises GatewayError if the run has none, or if the run or its gateway does not run.
    """
    if folder is None:
        raise GatewayError("there is no run on this machine: name one with --run, or give --url and --key")
    file = config_file(folder)
    if file is None:
        read_run(folder)  # raises NoSuchRun if there is none
        raise GatewayError(f"run {folder.name} has no configuration in {folder} yet: it is starting, or has failed")
    config = load_config(file)
    if not config.has_gateway:
        raise GatewayError(
            f"run {config.run.name} has no gateway: one belongs to a run from its start, by a section [gateway] in its "
            f"configuration. Of this run, `{run_command(folder, 'weights pull latest FOLDER')}` writes the newest model"
        )
    if (folder / STATE_FILE).exists() and (status := read_run(folder).status) != "running":
        resume = run_command(folder, "runs resume")
        raise GatewayError(f"run {config.run.name} has {status}, and its gateway with it; `{resume}` continues it")
    address = folder / ADDRESS_FILE
    if not address.exists():
        command = f"{laminar_command()} submit gateway {shlex.quote(str(file))} --detach"
        submitted = "" if (folder / CONFIG_FILE).is_file() else f": `{command}`"
        raise GatewayError(f"the gateway of run {config.run.name} has not started{submitted}")
    url = str(json.loads(address.read_text())["url"])
    return GatewayAccess(url, _key_of(config, folder, holder), folder / SERVING_LOG)


def deployed_access(file: Path, holder: str) -> GatewayAccess:
    """The access of `holder` to the gateway in whose container this process runs, with the configuration in `file`.

    Raises GatewayError elsewhere.
    """
    url = os.environ.get(GATEWAY_URL)
    if not url:
        raise GatewayError(f"{GATEWAY_URL} is not set: use --config in a container of the gateway, elsewhere --run")
    config = load_config(file)
    if config.gateway is not None and config.gateway.advertise:
        url = _with_host(url, config.gateway.advertise)
    return GatewayAccess(url, _key_of(config, config.run_folder, holder))


def url_here(url: str) -> str:
    """The `url` of a gateway with a host to which this machine can connect: it may listen at all addresses."""
    return _with_host(url, "::1" if "[" in url else "127.0.0.1") if _is_unspecified(url) else url


def url_elsewhere(url: str) -> str:
    """The `url` of a gateway of this machine for other machines: of all its addresses, its name."""
    return _with_host(url, machine_name()) if _is_unspecified(url) else url


def _is_unspecified(url: str) -> bool:
    return is_unspecified(urlsplit(url).hostname or "")


def _with_host(url: str, host: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{f'[{host}]' if ':' in host else host}:{parts.port}"))


def _key_of(config: Config, folder: Path, holder: str) -> str:
    named = "" if config.gateway is None else config.gateway.secret_file
    return EpisodeKeys(config.run.name, read_secret(Path(named) if named else folder / SECRET_FILE)).key_of(holder)


def _message_in(body: bytes) -> str:
    """The message of an error in OpenAI's shape; empty for other bodies."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
