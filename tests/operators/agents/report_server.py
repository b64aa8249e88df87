"""A gateway of a few lines, which keeps the reports of agents."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from operators.io.episode_keys import ADDRESS_FILE


class Reports:
    """A gateway that keeps the reports; it refuses the first `refused` of them, and rejects those with rewards."""

    def __init__(self, folder: Path) -> None:
        self.received: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.refused, self.refusal = 0, 503
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.keys.append(self.headers["authorization"])
                if outer.refused:
                    outer.refused -= 1
                    self.send_error(outer.refusal)
                    return
                if "rewards" in body:
                    self.send_response(400)
                    self.end_headers()
                    self.wfile.write(json.dumps({"error": {"message": "rewards: no such id"}}).encode())
                    return
                outer.received.append(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        port = self.server.server_address[1]
        (folder / ADDRESS_FILE).write_text(json.dumps({"url": f"http://127.0.0.1:{port}/v1", "port": port}))

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
