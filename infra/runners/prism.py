"""Prism, Beam's portable local runner: where its binary is, and one of it for as long as a pipeline runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from infra.runners.own_server import serving

VERSION = "2.77.0"
"""Of Apache Beam; Prism's must be the same."""
PACKAGE = f"github.com/apache/beam/sdks/v2/go/cmd/prism@v{VERSION}"
PATH_VARIABLE = "LAMINAR_PRISM"
_START_S = 20.0


class PrismMissing(RuntimeError):
    """There is no Prism binary on this machine, and none could be built."""


def find_prism() -> Path | None:
    """The Prism binary: `$LAMINAR_PRISM`, else on PATH, else where `go install` puts it; None if it is nowhere."""
    places = [os.environ.get(PATH_VARIABLE), shutil.which("prism")]
    places += [str(folder / "prism") for folder in _go_folders()]
    return next((Path(place) for place in places if place and os.access(place, os.X_OK)), None)


def prism_binary() -> Path:
    """The Prism binary, built from source with Go where it is missing (once, 250 s of CPU).

    Raises PrismMissing, saying what to do, when there is neither.
    """
    found = find_prism()
    if found is not None:
        return found
    go = shutil.which("go")
    how = f"install Go and run `go install {PACKAGE}`, or set {PATH_VARIABLE} to the binary"
    if go is None:
        raise PrismMissing(f"no `prism` on PATH or in {_go_folders()[0]}, and no `go` to build it: {how}")
    built = subprocess.run([go, "install", PACKAGE], capture_output=True, text=True, check=False)
    found = find_prism()
    if found is None:
        raise PrismMissing(f"`go install {PACKAGE}` failed: {built.stderr.strip()[-2000:]}\n{how}")
    return found


def running_prism() -> AbstractContextManager[str]:
    """A Prism for as long as the context lasts; its value is the job endpoint. Raises PrismMissing, RuntimeError."""
    binary = prism_binary()

    def command(port: int, folder: Path) -> list[str]:
        return [str(binary), "--job_port", str(port), "--serve_http=false", "--log_level", "warn"]

    return serving("Prism", command, _START_S)


def _go_folders() -> list[Path]:
    gopath = os.environ.get("GOPATH", "").split(os.pathsep)[0]
    folders = [os.environ.get("GOBIN", ""), os.path.join(gopath, "bin") if gopath else "", "~/go/bin"]
    return [Path(folder).expanduser() for folder in folders if folder]


if __name__ == "__main__":
    try:
        print(prism_binary())
    except PrismMissing as missing:
        sys.exit(str(missing))
