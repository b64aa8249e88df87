"""A Flink cluster's REST interface: it lists jobs and cancels them, as Flink 1.20 and 2.x respond."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer

FIXED = {"/config": b'{"flink-version": "1.19.1"}', "/overview": b'{"slots-total": 4, "slots-available": 2}'}


@dataclass
class FakeFlink:
    """Jobs as a list of id, name and state. A cancelled job is CANCELLING until it was listed `listings` times."""

    jobs: list[list[str]] = field(default_factory=list)
    listings: int = 2
    cancelled: list[str] = field(default_factory=list)
    late: list[list[str]] = field(default_factory=list)
    """Jobs that appear after the first list without them."""
    address: str = ""
    ends_by_itself: bool = False
    """A job ends just before it is cancelled: Flink then responds with 409."""

    def listed(self) -> bytes:
        found = [dict(zip(("jid", "name", "state"), job, strict=True)) for job in self.jobs]
        self.jobs, self.late = [*self.jobs, *self.late], []
        for job in self.jobs:
            if job[2] == "CANCELLING":
                self.listings -= 1
                job[2] = "CANCELED" if self.listings <= 0 else job[2]
        return json.dumps({"jobs": found}).encode()

    def cancel(self, path: str) -> int:
        """The status of the response to a request PATCH for `path`."""
        (job,) = (each for each in self.jobs if path == f"/jobs/{each[0]}?mode=cancel")
        self.cancelled.append(job[0])
        job[2] = "FINISHED" if self.ends_by_itself else "CANCELLING"
        return 409 if self.ends_by_itself else 202


@contextmanager
def fake_flink() -> Iterator[FakeFlink]:
    """A cluster without jobs, which responds at its address within the `with` block."""
    fake = FakeFlink()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in ("/jobs/overview", *FIXED) else 404)
            self.end_headers()
            self.wfile.write(FIXED.get(self.path) or fake.listed())

        def do_PATCH(self) -> None:
            self.send_response(fake.cancel(self.path))
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        fake.address = f"127.0.0.1:{server.server_port}"
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()
