"""A stand-in for the API server of Kubernetes: it accepts the scale of a StatefulSet from one service account."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from faults.network import Host, within

from infra.certificates import Authority
from infra.files import write_private

PORT = 6443
TOKEN = "the-token-of-the-account"


class ApiServer:
    """`scales` has each request in order: its path, and the number of replicas that it sets."""

    def __init__(self, host: Host, account: Path) -> None:
        self.address = f"{host.address}:{PORT}"
        self.scales: list[tuple[str, int]] = []
        account.mkdir(mode=0o755)
        authority = Authority.create()
        authority.write(account / "ca.crt", account.with_suffix(".key"))
        (account / "token").write_text(TOKEN)
        for file in account.iterdir():
            file.chmod(0o644)
        certificate = account.with_suffix(".pem")
        write_private(certificate, authority.issue("kubernetes", (host.address,)))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        scales = self.scales

        class Handler(BaseHTTPRequestHandler):
            def do_PATCH(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                known = self.headers["authorization"] == f"Bearer {TOKEN}"
                right = self.headers["content-type"] == "application/merge-patch+json"
                self.send_response(200 if known and right else 403)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())
                if known and right:
                    scales.append((self.path, body["spec"]["replicas"]))

            def log_message(self, format: str, *values: object) -> None:
                pass

        self._server = within(host, lambda: ThreadingHTTPServer((host.address, PORT), Handler))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Answer requests until the context ends."""
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()
