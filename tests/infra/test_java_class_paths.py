"""Java class paths: resolved once, verified each time, and resolved again if a jar is missing."""

from __future__ import annotations

import hashlib
import pwd
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jgo
import pytest

from infra.kafka.broker_jars import JARS as KAFKA
from infra.maven import JarResolutionError, Jars, WrongJar, mirror_of_central, read_digests
from infra.runners.flink_jars import JARS as FLINK
from infra.runners.prism import find_prism


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
    """Replace the repository by a stand-in and return the coordinates of each request."""
    endpoints: list[str] = []

    def resolve(endpoint: str, repositories: dict[str, str]) -> list[Artifact]:
        endpoints.append(endpoint)
        return [Artifact(tmp_path / "a.jar"), Artifact(tmp_path / "b.jar")]

    monkeypatch.setattr(jgo, "resolve", resolve)
    return endpoints


JAR = hashlib.sha256(b"jar").hexdigest()


@pytest.fixture
def jars(tmp_path: Path) -> Jars:
    """Kafka's coordinates, with the digests of the stand-in's jars."""
    digests = tmp_path / "digests"
    digests.write_text(f"{JAR}  a.jar\n{JAR}  b.jar\n")
    return replace(KAFKA, digests=digests)


@pytest.mark.parametrize(("cache", "why"), [("", "no home directory"), ("/dev/null", "Not a directory")])
def test_class_path_names_variables_without_a_cache(cache: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "LAMINAR_JARS", "LAMINAR_PRISM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a container's user without a name
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert not KAFKA.is_resolved()
    assert find_prism() is None
    with pytest.raises(JarResolutionError, match=rf"{why}.*set HOME or XDG_CACHE_HOME .*, or LAMINAR_JARS"):
        KAFKA.class_path()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda folder: (folder / "a.jar").write_bytes(b"other"), r"a\.jar has SHA-256 [0-9a-f]{64}, but digests has"),
        (lambda folder: (folder / "digests").write_text("0" * 64 + "  a.jar\n"), r"a\.jar has SHA-256"),
        (lambda folder: (folder / "digests").write_text(""), r"a\.jar is not a jar of"),
        (
            lambda folder: (folder / "digests").write_text(f"{JAR}  a.jar\n{JAR}  b.jar\n{JAR}  c.jar\n"),
            r"lacks the jars c\.jar",
        ),
    ],
)
def test_class_path_raises_for_a_wrong_jar(
    change: Callable[[Path], object], why: str, jars: Jars, tmp_path: Path, resolutions: list[str]
) -> None:
    jars.class_path(cache=tmp_path / "cache")
    change(tmp_path)
    with pytest.raises(WrongJar, match=why):  # also if the list was written earlier
        jars.class_path(cache=tmp_path / "cache")


@pytest.mark.parametrize(("jars", "count"), [(KAFKA, 46), (FLINK, 163)])
def test_digest_files_have_every_jar(jars: Jars, count: int) -> None:
    assert len(read_digests(jars.digest_file)) == count


def test_read_digests_raises_for_an_invalid_file(tmp_path: Path) -> None:
    (tmp_path / "it").write_text("abc  a.jar\n")
    with pytest.raises(ValueError, match="must be a digest and a name"):
        read_digests(tmp_path / "it")


def test_class_path_resolves_again_when_a_jar_is_missing(tmp_path: Path, resolutions: list[str], jars: Jars) -> None:
    paths = [tmp_path / "a.jar", tmp_path / "b.jar"]
    steps: list[str] = []
    assert jars.class_path(steps.append, cache=tmp_path / "cache") == paths
    assert resolutions == ["+".join(jars.coordinates)]
    assert steps[1:] == ["downloading 1/2 a.jar", "downloading 2/2 b.jar"]
    steps.clear()
    assert jars.class_path(steps.append, cache=tmp_path / "cache") == paths
    assert (len(resolutions), steps) == (1, [])
    paths[0].unlink()
    assert jars.class_path(cache=tmp_path / "cache") == paths
    assert len(resolutions) == 2


def test_class_path_of_an_image_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resolutions: list[str], jars: Jars
) -> None:
    image, user = tmp_path / "image", tmp_path / "user"
    monkeypatch.setenv("XDG_CACHE_HOME", str(image))
    paths = jars.class_path()
    monkeypatch.setenv("LAMINAR_JARS", str(image / "laminar"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(user))
    assert jars.class_path() == paths
    assert len(resolutions) == 1
    assert replace(jars, name="other").folder.parent == user / "laminar", "the image does not have these"


def test_class_path_ignores_a_list_of_other_versions(tmp_path: Path, resolutions: list[str], jars: Jars) -> None:
    (tmp_path / "old.jar").touch()
    (tmp_path / "class-path.txt").write_text(f"org.apache.kafka:kafka_2.13:1.0\nx\ny\n{tmp_path / 'old.jar'}\n")
    assert jars.class_path(cache=tmp_path) == [tmp_path / "a.jar", tmp_path / "b.jar"]


def test_class_path_raises_without_network_and_writes_no_list(
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
def test_mirror_of_central_reads_maven_settings(mirror_of: str, expected: str | None) -> None:
    mirror = f"<mirror><id>m</id><mirrorOf>{mirror_of}</mirrorOf><url> http://mirror </url></mirror>"
    for namespace in ("", ' xmlns="http://maven.apache.org/SETTINGS/1.0.0"'):
        assert mirror_of_central(f"<settings{namespace}><mirrors>{mirror}</mirrors></settings>") == expected
