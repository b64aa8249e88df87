"""Prism, Beam's portable local runner: finding, building and running its binary.

Prism listens on all interfaces and runs the code that it is sent. This project's build listens on loopback: one line is
changed in a copy of its sources, whose hash must be `SUM`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from infra.files import NoHomeDirectory, user_cache
from infra.runners.local_server import running_server

VERSION = "2.77.0"
"""The version of Apache Beam and of Prism, which must be the same."""
_MODULE = f"github.com/apache/beam/sdks/v2@v{VERSION}"
SUM = "h1:RsC61pHEvtySEHAURQyP/+CVOJm/hy5hewuG9JF0+Ow="
"""The hash of the module's files, which `go mod download -json` prints; its own go.sum has those of dependencies."""
_PACKAGE = "./go/cmd/prism"
_SERVER = "go/pkg/beam/runners/prism/internal/jobservices/server.go"
_LISTEN_ALL, _LISTEN_LOOPBACK = 'net.Listen("tcp", fmt.Sprintf(":', 'net.Listen("tcp", fmt.Sprintf("127.0.0.1:'
PATH_VARIABLE = "LAMINAR_PRISM"
_START_S = 20.0


class PrismMissing(RuntimeError):
    """There is no Prism binary on this machine, and it could not be built."""


class WrongSources(PrismMissing):
    """The sources of Prism are not those with which this project was tested."""


def built_prism() -> Path:
    """The path of this project's build of Prism in the user's cache, by version; it may not exist yet.

    Raises NoHomeDirectory.
    """
    return user_cache() / f"prism-{VERSION}" / "prism"


def find_prism() -> Path | None:
    """The Prism binary: that of `$LAMINAR_PRISM` if set, else this project's build; None if it does not exist.

    PATH is not searched: a `prism` there may be another program.
    """
    try:
        binary = Path(os.environ.get(PATH_VARIABLE) or built_prism())
    except NoHomeDirectory:
        return None
    return binary if binary.is_file() and os.access(binary, os.X_OK) else None


def prism_binary() -> Path:
    """The Prism binary, built from source with Go if it is missing (once, 250 s of CPU).

    Raises PrismMissing, with advice, if it cannot be built, WrongSources and NoHomeDirectory.
    """
    found = find_prism()
    if found is not None:
        return found
    if path_given := os.environ.get(PATH_VARIABLE):
        raise PrismMissing(
            f"{PATH_VARIABLE} is {path_given!r}, which is not executable: name a Prism {VERSION}, or unset it"
        )
    go = shutil.which("go")
    advice = f"install Go and run `make prism`, or set {PATH_VARIABLE} to a binary of it that listens on loopback"
    if go is None:
        raise PrismMissing(f"no Prism in {built_prism().parent}, and no `go` to build it: {advice}")
    try:
        _build(go)
    except subprocess.CalledProcessError as error:
        arguments = " ".join(map(str, error.cmd))
        raise PrismMissing(f"`{arguments}` failed: {error.stderr.strip()[-2000:]}\n{advice}") from error
    return built_prism()


def _build(go: str) -> None:
    """Build Prism. Raises subprocess.CalledProcessError, WrongSources."""

    def run(*arguments: str, cwd: str | None = None) -> str:
        return subprocess.run([go, *arguments], capture_output=True, text=True, check=True, cwd=cwd).stdout

    with tempfile.TemporaryDirectory(prefix="laminar-prism-") as folder:
        module = Path(json.loads(run("mod", "download", "-json", _MODULE, cwd=folder))["Dir"])
        if (found := module_sum(module, _MODULE)) != SUM:
            raise WrongSources(
                f"{module} has the sum {found}, but Prism {VERSION} has {SUM}: it is not built. Remove the folder "
                "(`go clean -modcache`) to download it again; if it is still wrong, do not trust its source"
            )
        sources = shutil.copytree(module / "go", Path(folder) / "sdk" / "go", copy_function=shutil.copyfile).parent
        for name in ("go.mod", "go.sum"):
            if (module / name).exists():
                shutil.copyfile(module / name, sources / name)
        server = sources / _SERVER
        source = server.read_text(encoding="utf-8")
        if source.count(_LISTEN_ALL) != 1:
            raise WrongSources(
                f"{module / _SERVER} does not have the expected listen call: it cannot be restricted to loopback"
            )
        os.chmod(server.parent, 0o700)
        server.write_text(source.replace(_LISTEN_ALL, _LISTEN_LOOPBACK), encoding="utf-8")
        built_prism().parent.mkdir(parents=True, exist_ok=True)
        partial = built_prism().with_suffix(".partial")
        run("build", "-mod=readonly", "-o", str(partial), _PACKAGE, cwd=str(sources))
        partial.replace(built_prism())


def module_sum(folder: Path, module: str) -> str:
    """The hash of the extracted `module` ("path@version") in `folder`, as in a go.sum (its algorithm h1)."""
    lines = sorted(
        (file.relative_to(folder).as_posix(), hashlib.sha256(file.read_bytes()).hexdigest())
        for file in folder.rglob("*")
        if not file.is_dir()
    )
    text = "".join(f"{digest}  {module}/{name}\n" for name, digest in lines)
    return "h1:" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def running_prism(location: str | None = None) -> AbstractContextManager[str]:
    """Run a Prism, the binary `location` if given, during the context; its value is the job endpoint.

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
