"""Keys of episodes: an agent proves with its key which episode it plays. A key needs no storage: it is a MAC."""

from __future__ import annotations

import hashlib
import hmac

from schemas.identity import is_trajectory_id

ADDRESS_FILE = "gateway.json"
"""In the run's folder: the URL of the gateway."""
SECRET_FILE = "gateway.secret"
"""In the run's folder: the secret from which the keys follow."""
SERVING_LOG = "serving.log"
"""In the run's folder: the log of the process that answers people."""
PREFIX = "lm"
ATTEMPT = "~"
"""What follows it in a key names the agent's attempt, which begins to count its requests again."""
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
