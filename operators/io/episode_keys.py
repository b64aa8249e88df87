"""Keys of episodes: an agent proves with its key which episode it plays. A key needs no storage: it is a MAC."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from schemas.identity import is_trajectory_id

ADDRESS_FILE = "gateway.json"
"""In the run's folder: the URL of the gateway."""
SECRET_FILE = "gateway.secret"
"""In the run's folder: the secret from which the keys follow."""
PREFIX = "lm"
ATTEMPT = "~"
"""What follows it in a key is the number of the agent's attempt, which begins to count its requests again."""
MIN_SECRET_CHARACTERS = 16


class EpisodeKeys:
    """Derives keys from the `secret` of run `run`: `lm-p12.3-<MAC>`."""

    def __init__(self, run: str, secret: str) -> None:
        self._run, self._secret = run, secret.encode()

    def key_of(self, trajectory_id: str) -> str:
        """The key of an episode."""
        mac = hmac.new(self._secret, f"{self._run}\0{trajectory_id}".encode(), hashlib.sha256).hexdigest()[:40]
        return f"{PREFIX}-{trajectory_id}-{mac}"

    def episode_of(self, key: str) -> str | None:
        """The episode of `key`; None if the key is not valid."""
        key = key.partition(ATTEMPT)[0]
        prefix, _, rest = key.partition("-")
        name = rest.partition("-")[0]
        if prefix != PREFIX or not is_trajectory_id(name):
            return None
        return name if hmac.compare_digest(self.key_of(name).encode(), key.encode()) else None


def read_or_create_secret(file: Path, create: bool) -> str:
    """The secret in the first line of `file`; with `create` it is written if the file does not exist.

    Raises ValueError for a short secret, OSError if the file cannot be read.
    """
    if create and not file.exists():
        partial = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        partial.write_text(secrets.token_hex(32) + "\n")
        partial.chmod(0o600)
        try:
            os.link(partial, file)  # fails if another process was first
        except FileExistsError:
            pass
        finally:
            partial.unlink()
    lines = file.read_text().splitlines()
    if not lines or len(lines[0].strip()) < MIN_SECRET_CHARACTERS:
        raise ValueError(f"{file}: the secret in its first line must have at least {MIN_SECRET_CHARACTERS} characters")
    return lines[0].strip()
