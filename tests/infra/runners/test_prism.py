"""Where Prism is looked for, what is said when it is nowhere, and that none stays behind."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from infra.runners.prism import PACKAGE, PrismMissing, find_prism, prism_binary

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without Prism and without Go; its home."""
    for name in ("LAMINAR_PRISM", "GOPATH", "GOBIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def executable(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


def test_the_binary_is_looked_for_where_it_may_be(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_prism() is None
    for place in (bare / "go" / "bin" / "prism", bare / "bin" / "prism"):  # each goes before those already there
        executable(place)
        assert find_prism() == place
    monkeypatch.setenv("LAMINAR_PRISM", str(bare / "own"))
    assert find_prism() == bare / "bin" / "prism"  # for there is nothing where the variable points
    executable(bare / "own")
    assert find_prism() == bare / "own"


def test_without_go_the_way_to_get_it_is_told(bare: Path) -> None:
    with pytest.raises(PrismMissing, match=r"no `go` to build it: install Go and run `go install .*prism@v2\.77\.0`"):
        prism_binary()


def test_go_builds_it(bare: Path) -> None:
    target = bare / "go" / "bin" / "prism"
    executable(
        bare / "bin" / "go", f'#!/bin/sh\n/bin/mkdir -p {target.parent}\necho "$@" > {target}\n/bin/chmod +x {target}\n'
    )
    assert prism_binary() == target
    assert target.read_text() == f"install {PACKAGE}\n"


def test_a_build_that_fails_shows_why(bare: Path) -> None:
    executable(bare / "bin" / "go", "#!/bin/sh\necho no network >&2\nexit 1\n")
    with pytest.raises(PrismMissing, match="no network"):
        prism_binary()


PRISM = find_prism()


@pytest.mark.skipif(PRISM is None, reason="no Prism is found: `make prism` builds it, with Go")
def test_a_killed_pipeline_leaves_no_prism() -> None:
    program = (
        "import psutil, time; from infra.runners.prism import running_prism\n"
        "with running_prism() as endpoint:\n"
        "    [prism] = psutil.Process().children(); print(prism.pid, endpoint, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as owner:
        assert owner.stdout is not None
        assert PRISM is not None
        pid, endpoint = owner.stdout.readline().split()
        prism = psutil.Process(int(pid))
        assert Path(prism.exe()) == PRISM.resolve()
        assert endpoint.startswith("127.0.0.1:")
        owner.kill()
        prism.wait(5)
