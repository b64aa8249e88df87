"""An S3-compatible server on loopback, for tests with object stores."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from moto.server import ThreadedMotoServer
from pyarrow.fs import S3FileSystem

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_EC2_METADATA_DISABLED": "true"}


@dataclass(frozen=True)
class ObjectStore:
    """A running server at `address` (host:port)."""

    address: str

    def bucket(self, name: str) -> str:
        """Create the bucket `name`. Returns the URI of a folder in it, with the client's options."""
        S3FileSystem(endpoint_override=self.address, scheme="http", allow_bucket_creation=True).create_dir(name)
        return self.uri(f"{name}/folder")

    def uri(self, path: str) -> str:
        """The URI of `path` (bucket/key)."""
        return f"s3://{path}?endpoint_override={self.address}&scheme=http&region=us-east-1"


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A server within the block; its credentials are in the environment, as users set them."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    with mock.patch.dict(os.environ, CREDENTIALS):
        server.start()
        try:
            host, port = server.get_host_and_port()
            yield ObjectStore(f"{host}:{port}")
        finally:
            server.stop()
