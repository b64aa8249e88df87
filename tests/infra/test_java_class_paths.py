"""The broker's jars: asked for once, kept in a list, asked for again when one is gone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jgo
import pytest

from infra.kafka.broker_jars import JARS
from infra.maven import JarResolutionError, mirror_of_central


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


def test_jars_are_resolved_once_and_again_when_one_is_gone(tmp_path: Path, resolutions: list[str]) -> None:
    jars = [tmp_path / "a.jar", tmp_path / "b.jar"]
    steps: list[str] = []
    assert JARS.class_path(steps.append, cache=tmp_path / "cache") == jars
    assert resolutions == ["+".join(JARS.coordinates)]
    assert steps[1:] == ["fetching 1/2 a.jar", "fetching 2/2 b.jar"]
    steps.clear()
    assert JARS.class_path(steps.append, cache=tmp_path / "cache") == jars
    assert (len(resolutions), steps) == (1, [])
    jars[0].unlink()
    assert JARS.class_path(cache=tmp_path / "cache") == jars
    assert len(resolutions) == 2


def test_a_list_for_other_versions_is_not_used(tmp_path: Path, resolutions: list[str]) -> None:
    (tmp_path / "old.jar").touch()
    (tmp_path / "class-path.txt").write_text(f"org.apache.kafka:kafka_2.13:1.0\nx\ny\n{tmp_path / 'old.jar'}\n")
    assert JARS.class_path(cache=tmp_path) == [tmp_path / "a.jar", tmp_path / "b.jar"]


def test_no_network_is_said_plainly_and_leaves_no_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(endpoint: str, repositories: dict[str, str]) -> list[Artifact]:
        raise ConnectionError("no route")

    monkeypatch.setattr(jgo, "resolve", resolve)
    with pytest.raises(JarResolutionError, match=r"org\.apache\.kafka:kafka_2\.13.*no route.*settings\.xml"):
        JARS.class_path(cache=tmp_path)
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
