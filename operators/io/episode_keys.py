"""Keys of episodes: an agent proves with its key which episode it plays. A key needs no storage: it is a MAC."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import tempfile
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
PEOPLE, WORKERS = "people", "workers"
"""What stands for the episode in the keys of people, and of the programs elsewhere that play episodes."""


class EpisodeKeys:
    """Derives keys from the `secret` of run `run`: `lm-p12.3-<MAC>`."""

    def __init__(self, run: str, secret: str) -> None:
        self._run, self._secret = run, secret.encode()

    def key_of(self, trajectory_id: str) -> str:
        """The key of an episode, of PEOPLE or of WORKERS."""
        mac = hmac.new(self._secret, f"{self._run}\0{trajectory_id}".encode(), hashlib.sha256).hexdigest()[:40]
        return f"{PREFIX}-{trajectory_id}-{mac}"

    def holder_of(self, key: str) -> str | None:
        """The episode of `key`, PEOPLE or WORKERS; None if the key is not valid."""
        key = key.partition(ATTEMPT)[0]
        prefix, _, rest = key.partition("-")
        name = rest.partition("-")[0]
        if prefix != PREFIX or not (name in (PEOPLE, WORKERS) or is_trajectory_id(name)):
            return None
        return name if hmac.compare_digest(self.key_of(name).encode(), key.encode()) else None


def read_or_create_secret(file: Path, create: bool) -> str:
    """The secret in the first line of `file`; with `create` it is written if the file does not exist.

    Raises ValueError for a short secret, OSError if the file cannot be read.
    """
    if create and not file.exists():
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.") as partial:  # of mode 0600
            partial.write(secrets.token_hex(32) + "\n")
            partial.flush()
            with contextlib.suppress(FileExistsError):  # another process or thread was first
                os.link(partial.name, file)
    lines = file.read_text().splitlines()
    if not lines or len(lines[0].strip()) < MIN_SECRET_CHARACTERS:
        raise ValueError(f"{file}: the secret in its first line must have at least {MIN_SECRET_CHARACTERS} characters")
    return lines[0].strip()
