"""The process that answers people, started as the gateway starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from pipelines.config import Config, plain_table

PROGRAM = """
import sys
from pathlib import Path
from pipelines import serve_versions
serve_versions.NICENESS = 0  # beside a busy test it would get a third of the time
serve_versions.main(Path(sys.argv[1]))
"""


class Served:
    """The process, and its events by request."""

    def __init__(self, config: Config, work: Path) -> None:
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(work)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.send(**plain_table(config))

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def ask(self, name: str, version: str, *stop_strings: str) -> None:
        stops = {"stop_token_ids": [], "stop_strings": stop_strings}
        settings = {"max_tokens": 5, **stops, "temperature": 0.0, "top_p": 1.0}
        self.send(id=name, version=version, tokens=[5, 6, 7], **settings)

    def event(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return dict(json.loads(self._process.stdout.readline()))

    def answer(self, name: str) -> tuple[list[int], str]:
        """Tokens and version of the answer to request `name`, which is the only one."""
        tokens: list[int] = []
        while True:
            event = self.event()
            assert (event["id"], event.get("error")) == (name, None)
            tokens += event["tokens"]
            if event["finish"]:
                return tokens, event["version"]

    def close(self) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        code = self._process.wait(60)
        self._process.stdout.close()
        return code
