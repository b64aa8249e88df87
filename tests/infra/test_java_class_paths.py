"""The broker's jars: asked for once, kept in a list, asked for again when one is gone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jgo
import pytest

from infra.kafka.broker_jars import JARS as KAFKA
from infra.maven import JarResolutionError, Jars, WrongJar, mirror_of_central, read_digests
from infra.runners.flink_jars import JARS as FLINK


@dataclass
class Artifact:
    path: Path

    @property
    def filename(self) -> str:
        return self.path.name

    def resolve(self) -> Path:
        self.path.write_bytes(b"jar")
        return self.path


@pytest.fixture
def resolutions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for the repository; the coordinates of each time it is asked."""
    asked: list[str] = []

    def resolve(endpoint: str, repositories: dict[str, str]) -> list[Artifact]:
        asked.append(endpoint)
        return [Artifact(tmp_path / "a.jar"), Artifact(tmp_path / "b.jar")]

    monkeypatch.setattr(jgo, "resolve", resolve)
    return asked


JAR = hashlib.sha256(b"jar").hexdigest()


@pytest.fixture
def jars(tmp_path: Path) -> Jars:
    """Kafka's coordinates, with the digests of what the stand-in gives."""
    digests = tmp_path / "digests"
    digests.write_text(f"{JAR}  a.jar\n{JAR}  b.jar\n")
    return replace(KAFKA, digests=digests)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda folder: (folder / "a.jar").write_bytes(b"other"), r"a\.jar has SHA-256 [0-9a-f]{64}, and digests says"),
        (lambda folder: (folder / "digests").write_text("0" * 64 + "  a.jar\n"), r"a\.jar has SHA-256"),
        (lambda folder: (folder / "digests").write_text(""), r"a\.jar is none of the jars"),
        (
            lambda folder: (folder / "digests").write_text(f"{JAR}  a.jar\n{JAR}  b.jar\n{JAR}  c.jar\n"),
            r"lacks c\.jar",
        ),
    ],
)
def test_a_jar_that_is_not_ours_is_refused(
    change: Callable[[Path], object], why: str, jars: Jars, tmp_path: Path, resolutions: list[str]
) -> None:
    jars.class_path(cache=tmp_path / "cache")
    change(tmp_path)
    with pytest.raises(WrongJar, match=why):  # also of a list that was made when all was well
        jars.class_path(cache=tmp_path / "cache")


@pytest.mark.parametrize(("jars", "count"), [(KAFKA, 46), (FLINK, 163)])
def test_every_jar_has_a_digest(jars: Jars, count: int) -> None:
    assert len(read_digests(jars.digest_file)) == count


def test_a_digest_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "it").write_text("abc  a.jar\n")
    with pytest.raises(ValueError, match="no digest and name"):
        read_digests(tmp_path / "it")


def test_jars_are_resolved_once_and_again_when_one_is_gone(tmp_path: Path, resolutions: list[str], jars: Jars) -> None:
    paths = [tmp_path / "a.jar", tmp_path / "b.jar"]
    steps: list[str] = []
    assert jars.class_path(steps.append, cache=tmp_path / "cache") == paths
    assert resolutions == ["+".join(jars.coordinates)]
    assert steps[1:] == ["fetching 1/2 a.jar", "fetching 2/2 b.jar"]
    steps.clear()
    assert jars.class_path(steps.append, cache=tmp_path / "cache") == paths
    assert (len(resolutions), steps) == (1, [])
    paths[0].unlink()
    assert jars.class_path(cache=tmp_path / "cache") == paths
    assert len(resolutions) == 2


def test_a_list_for_other_versions_is_not_used(tmp_path: Path, resolutions: list[str], jars: Jars) -> None:
    (tmp_path / "old.jar").touch()
    (tmp_path / "class-path.txt").write_text(f"org.apache.kafka:kafka_2.13:1.0\nx\ny\n{tmp_path / 'old.jar'}\n")
    assert jars.class_path(cache=tmp_path) == [tmp_path / "a.jar", tmp_path / "b.jar"]


def test_no_network_is_said_plainly_and_leaves_no_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jars: Jars
) -> None:
    def resolve(endpoint: str, repositories: dict[str, str]) -> list[Artifact]:
        raise ConnectionError("no route")

    monkeypatch.setattr(jgo, "resolve", resolve)
    with pytest.raises(JarResolutionError, match=r"org\.apache\.kafka:kafka_2\.13.*no route.*settings\.xml"):
        jars.class_path(cache=tmp_path)
    assert not (tmp_path / "class-path.txt").exists()


@pytest.mark.parametrize(
    ("mirror_of", "expected"),
    [
        ("central", "http://mirror"),
        ("*", "http://mirror"),
        ("external:*", "http://mirror"),
        ("internal, central", "http://mirror"),
        ("*,!central", None),
        ("internal", None),
    ],
)
def test_finds_the_mirror_of_central_in_maven_settings(mirror_of: str, expected: str | None) -> None:
    mirror = f"<mirror><id>m</id><mirrorOf>{mirror_of}</mirrorOf><url> http://mirror </url></mirror>"
    for namespace in ("", ' xmlns="http://maven.apache.org/SETTINGS/1.0.0"'):
        assert mirror_of_central(f"<settings{namespace}><mirrors>{mirror}</mirrors></settings>") == expected
