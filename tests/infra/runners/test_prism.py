"""Finding, building and running Prism; it ends with its owner."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from infra.listening import listening_sockets
from infra.runners import prism
from infra.runners.prism import PrismMissing, WrongSources, built_prism, find_prism, prism_binary

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The home folder of a machine without Prism and Go."""
    for name in ("LAMINAR_PRISM", "GOPATH", "GOBIN", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def executable(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


def test_find_prism_uses_the_named_binary_or_our_build(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (bare / "go" / "bin" / "prism", bare / "bin" / "prism"):  # not built by this project: never run
        executable(path)
    assert find_prism() is None
    executable(built_prism())
    assert find_prism() == built_prism() == bare / ".cache" / "laminar" / "prism-2.77.0" / "prism"
    executable(bare / "own")
    monkeypatch.setenv("LAMINAR_PRISM", str(bare / "own"))
    assert find_prism() == bare / "own"


def test_prism_binary_raises_for_a_missing_named_binary(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(built_prism())
    monkeypatch.setenv("LAMINAR_PRISM", str(bare / "own"))
    assert find_prism() is None
    with pytest.raises(PrismMissing, match=r"LAMINAR_PRISM is '.*/own', which is not executable"):
        prism_binary()


def test_prism_binary_without_go_raises_with_advice(bare: Path) -> None:
    with pytest.raises(PrismMissing, match=r"no `go` to build it: install Go and run `make prism`"):
        prism_binary()


@pytest.fixture
def sources(bare: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module cache with Prism's server, and a `go` command on the path that records what it compiles."""
    server = bare / "sources" / "go" / "pkg" / "beam" / "runners" / "prism" / "internal" / "jobservices" / "server.go"
    server.parent.mkdir(parents=True)
    server.write_text('lis, err := net.Listen("tcp", fmt.Sprintf(":%d", port))')
    script = f"""import json, os, sys
arguments = sys.argv[1:]
if arguments[0] == "mod":
    print(json.dumps({{"Dir": {str(bare / "sources")!r}}}))
else:
    output = arguments[arguments.index("-o") + 1]
    with open(output, "w") as out:
        out.write(arguments[-1] + " with " + open({str(server.relative_to(bare / "sources"))!r}).read())
    os.chmod(output, 0o755)
"""
    executable(bare / "bin" / "go", f"#!{sys.executable} -S\n{script}")
    accept(bare / "sources", monkeypatch)
    return server


def accept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the files in `folder` the sources that are expected."""
    monkeypatch.setattr(prism, "SUM", prism.module_sum(folder, prism._MODULE))


def test_prism_binary_is_built_to_listen_on_loopback(sources: Path) -> None:
    assert prism_binary() == built_prism()
    patched = 'lis, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))'
    assert built_prism().read_text() == f"./go/cmd/prism with {patched}"
    assert ":%d" in sources.read_text()  # Go's own copy is unchanged


def test_prism_binary_raises_for_sources_without_the_listen_call(
    sources: Path, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources.write_text("package jobservices")
    accept(bare / "sources", monkeypatch)
    with pytest.raises(WrongSources, match="cannot be restricted to loopback"):
        prism_binary()


@pytest.mark.parametrize("change", ["changed", "added", "removed", "renamed"])
def test_prism_is_not_built_from_sources_with_another_sum(change: str, sources: Path, bare: Path) -> None:
    match change:
        case "changed":
            sources.write_text(sources.read_text() + " // and more")
        case "added":
            (bare / "sources" / "go" / "init.go").write_text("package main")
        case "removed":
            sources.unlink()
        case "renamed":
            sources.rename(sources.with_name("other.go"))
    with pytest.raises(WrongSources, match=r"has the sum h1:.*, but Prism 2\.77\.0 has h1:.* it is not built"):
        prism_binary()
    assert not built_prism().exists()


def test_module_sum_is_that_of_go(tmp_path: Path) -> None:
    (tmp_path / "go.mod").write_text("module example.com/m\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.go").write_text("package a\n")
    assert prism.module_sum(tmp_path, "example.com/m@v1.0.0") == "h1:+I43Nawoyvfwwg/E3sizOqS80cj/RJFm+N8CM2GGT9U="


CACHED = Path(os.environ.get("GOMODCACHE") or Path.home() / "go" / "pkg" / "mod") / prism._MODULE


@pytest.mark.skipif(not CACHED.is_dir(), reason="Go has not downloaded the sources of Prism: run `make prism`")
def test_sum_is_that_of_prisms_sources() -> None:
    assert prism.module_sum(CACHED, prism._MODULE) == prism.SUM


def test_prism_binary_raises_with_the_output_of_a_failed_build(bare: Path) -> None:
    executable(bare / "bin" / "go", "#!/bin/sh\necho no network >&2\nexit 1\n")
    with pytest.raises(PrismMissing, match="no network"):
        prism_binary()


PRISM = find_prism()


@pytest.mark.skipif(PRISM is None, reason="there is no Prism: build it with `make prism`")
def test_prism_ends_with_its_killed_owner() -> None:
    program = (
        "import psutil, time; from infra.runners.prism import running_prism\n"
        "with running_prism() as endpoint:\n"
        "    [prism] = psutil.Process().children(); print(prism.pid, endpoint, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as owner:
        assert owner.stdout is not None
        assert PRISM is not None
        pid, endpoint = owner.stdout.readline().split()
        running = psutil.Process(int(pid))
        assert Path(running.exe()) == PRISM.resolve()
        assert endpoint.startswith("127.0.0.1:")
        assert listening_sockets([running]) == {("127.0.0.1", int(endpoint.partition(":")[2]))}
        owner.kill()
        running.wait(60)
