"""Prism, Beam's portable local runner: where its binary is, and one of it for as long as a pipeline runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.kafka.broker import HOST, free_port, port_is_free
from infra.kafka.processes import is_running, spawn, stop_process

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


@contextmanager
def running_prism() -> Iterator[str]:
    """A Prism of this process's own, which the kernel ends with it; yields its job endpoint, `host:port`.

    Beam starts one too, but leaves it behind when the submitting process is killed. Raises PrismMissing, and
    RuntimeError when it does not come up.
    """
    binary = prism_binary()
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="laminar-prism-") as folder:
        log = Path(folder) / "prism.log"
        command = [str(binary), "--job_port", str(port), "--serve_http=false", "--log_level", "warn"]
        process = spawn(command, log, die_with_parent=True)
        try:
            deadline = time.monotonic() + _START_S
            while port_is_free(port):
                if not is_running(process) or time.monotonic() > deadline:
                    raise RuntimeError(f"{binary} did not come up: {log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.02)
            yield f"{HOST}:{port}"
        finally:
            stop_process(process, timeout=2.0)


def _go_folders() -> list[Path]:
    gopath = os.environ.get("GOPATH", "").split(os.pathsep)[0]
    folders = [os.environ.get("GOBIN", ""), os.path.join(gopath, "bin") if gopath else "", "~/go/bin"]
    return [Path(folder).expanduser() for folder in folders if folder]


if __name__ == "__main__":
    try:
        print(prism_binary())
    except PrismMissing as missing:
        sys.exit(str(missing))
