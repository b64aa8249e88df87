"""Prism, Beam's portable local runner: where its binary is, and one of it for as long as a pipeline runs.

Prism listens on all interfaces and runs what it is sent. Our build of it listens on loopback: one line is changed in
a copy of its sources, which Go has checked against its checksum database.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from infra.runners.local_server import running_server

VERSION = "2.77.0"
"""Of Apache Beam; Prism's must be the same."""
_MODULE = f"github.com/apache/beam/sdks/v2@v{VERSION}"
_PACKAGE = "./go/cmd/prism"
_SERVER = "go/pkg/beam/runners/prism/internal/jobservices/server.go"
_LISTENS, _ON_LOOPBACK = 'net.Listen("tcp", fmt.Sprintf(":', 'net.Listen("tcp", fmt.Sprintf("127.0.0.1:'
PATH_VARIABLE = "LAMINAR_PRISM"
_START_S = 20.0


class PrismMissing(RuntimeError):
    """There is no Prism binary on this machine, and none could be built."""


def built_prism() -> Path:
    """Where this project's own build of Prism is, or will be: in the user's cache, by version."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "laminar" / f"prism-{VERSION}" / "prism"


def find_prism() -> Path | None:
    """The Prism binary: where `$LAMINAR_PRISM` is set the one that it names, else our own build; None where it is not.

    A `prism` on PATH is another program as likely as not, so PATH is not searched.
    """
    binary = Path(os.environ.get(PATH_VARIABLE) or built_prism())
    return binary if binary.is_file() and os.access(binary, os.X_OK) else None


def prism_binary() -> Path:
    """The Prism binary, built from source with Go where it is missing (once, 250 s of CPU).

    Go checks the sources against its checksum database. Raises PrismMissing, saying what to do, when there is neither.
    """
    found = find_prism()
    if found is not None:
        return found
    if named := os.environ.get(PATH_VARIABLE):
        raise PrismMissing(f"{PATH_VARIABLE} is {named!r}, which is no program: name a Prism {VERSION}, or unset it")
    go = shutil.which("go")
    how = f"install Go and run `make prism`, or set {PATH_VARIABLE} to a binary of it that listens on loopback"
    if go is None:
        raise PrismMissing(f"no Prism in {built_prism().parent}, and no `go` to build it: {how}")
    try:
        _build(go)
    except subprocess.CalledProcessError as error:
        words = " ".join(map(str, error.cmd))
        raise PrismMissing(f"`{words}` failed: {error.stderr.strip()[-2000:]}\n{how}") from error
    return built_prism()


def _build(go: str) -> None:
    """Raises subprocess.CalledProcessError, and PrismMissing for sources that are not those we know."""

    def run(*words: str, cwd: str | None = None) -> str:
        return subprocess.run([go, *words], capture_output=True, text=True, check=True, cwd=cwd).stdout

    with tempfile.TemporaryDirectory(prefix="laminar-prism-") as folder:
        module = Path(json.loads(run("mod", "download", "-json", _MODULE, cwd=folder))["Dir"])
        sources = shutil.copytree(module / "go", Path(folder) / "sdk" / "go", copy_function=shutil.copyfile).parent
        for name in ("go.mod", "go.sum"):
            if (module / name).exists():
                shutil.copyfile(module / name, sources / name)
        server = sources / _SERVER
        source = server.read_text(encoding="utf-8")
        if source.count(_LISTENS) != 1:
            raise PrismMissing(
                f"{module / _SERVER} does not listen where it is known to: it cannot be kept to loopback"
            )
        os.chmod(server.parent, 0o700)
        server.write_text(source.replace(_LISTENS, _ON_LOOPBACK), encoding="utf-8")
        built_prism().parent.mkdir(parents=True, exist_ok=True)
        partial = built_prism().with_suffix(".partial")
        run("build", "-o", str(partial), _PACKAGE, cwd=str(sources))
        partial.replace(built_prism())


def running_prism(location: str | None = None) -> AbstractContextManager[str]:
    """A Prism for as long as the context lasts, the binary `location` where given; its value is the job endpoint.

    Raises PrismMissing, RuntimeError.
    """
    binary = prism_binary() if location is None else Path(location)

    def command(port: int, folder: Path) -> list[str]:
        return [str(binary), "--job_port", str(port), "--serve_http=false", "--log_level", "warn"]

    return running_server("Prism", command, _START_S)


if __name__ == "__main__":
    try:
        print(prism_binary())
    except PrismMissing as missing:
        sys.exit(str(missing))
