"""Java class paths: resolved once per user from Maven coordinates, then read from a list.

Only `jgo` connects to a repository, and only if the list is missing or a jar in it is gone. It stores the jars in the
user's Maven repository (`M2_REPO`, or `~/.m2/repository`), to which other programs write, too, so every jar is verified
against the SHA-256 in `infra/jars/NAME.sha256` each time before Java uses it. After a change of versions
`python -m infra.jars` rewrites those files.
"""

from __future__ import annotations

import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from infra.files import NoHomeDirectory, sha256_of, user_cache
from infra.processes import locked

LISTING = "class-path.txt"
PrintProgress = Callable[[str], None]


class JarResolutionError(RuntimeError):
    """Jars could not be resolved or downloaded."""


class WrongJar(JarResolutionError):
    """A jar does not have the SHA-256 with which this project was tested."""


@dataclass(frozen=True)
class Jars:
    """The jars of `coordinates` and their dependencies, listed under `name` in the user's cache.

    `description` is shown while they are downloaded; `alternative` is advice if they cannot be.
    """

    name: str
    description: str
    coordinates: tuple[str, ...]
    alternative: str
    digests: Path | None = None
    """The file with their SHA-256, as `sha256sum` writes it; None: `infra/jars/NAME.sha256`."""

    @property
    def digest_file(self) -> Path:
        """The file with the SHA-256 of each jar."""
        return self.digests or Path(__file__).with_name("jars") / f"{self.name}.sha256"

    @property
    def folder(self) -> Path:
        """The folder of the list of jars: that of LAMINAR_JARS if it has them, as an image may, else the user's.

        Raises NoHomeDirectory.
        """
        given = os.environ.get("LAMINAR_JARS")
        if given and (Path(given) / self.name / LISTING).is_file():
            return Path(given) / self.name
        return user_cache() / self.name

    def is_resolved(self) -> bool:
        """Whether the list exists, so that nothing must be downloaded."""
        try:
            return (self.folder / LISTING).is_file()
        except NoHomeDirectory:
            return False

    def class_path(self, progress: PrintProgress = lambda message: None, cache: Path | None = None) -> list[Path]:
        """The jars, verified; they are resolved and downloaded if necessary.

        `progress` gets one line of text per download step. Raises JarResolutionError if a jar can be neither found nor
        downloaded, WrongJar for a jar with another SHA-256.
        """
        jars = self.resolve(progress, cache)
        self.check(jars)
        return jars

    def check(self, jars: Iterable[Path]) -> None:
        """Raise WrongJar unless `jars` are exactly the jars of the digest file, with its SHA-256."""
        expected = read_digests(self.digest_file)
        for jar in jars:
            expected_digest = expected.pop(jar.name, None)
            if expected_digest is None:
                raise WrongJar(f"{jar} is not a jar of {self.name} ({self.digest_file})")
            if (found := sha256_of(jar)) != expected_digest:
                raise WrongJar(
                    f"{jar} has SHA-256 {found}, but {self.digest_file.name} has {expected_digest}: it is not run. "
                    "Remove the file to download it again; if it is still wrong, do not trust its repository"
                )
        if expected:
            raise WrongJar(f"{self.name} lacks the jars {', '.join(sorted(expected))} ({self.digest_file})")

    def resolve(self, progress: PrintProgress = lambda message: None, cache: Path | None = None) -> list[Path]:
        """As `class_path`, without verification."""
        try:
            folder = self.folder if cache is None else cache
            listing = folder / LISTING
            if listed_jars := self._read_listing(listing):
                return listed_jars
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / "lock"):
                if listed_jars := self._read_listing(listing):  # another process resolved them meanwhile
                    return listed_jars
                jars = self._resolve(progress)
                temporary = listing.with_suffix(".tmp")
                temporary.write_text("\n".join([*self.coordinates, *map(str, jars)]) + "\n", "utf-8")
                temporary.rename(listing)
        except (OSError, NoHomeDirectory) as error:  # of downloads they are JarResolutionErrors
            raise JarResolutionError(
                f"the list of the jars of {self.name} cannot be read or written ({error}): set HOME or XDG_CACHE_HOME "
                "to a folder that this user may write, or LAMINAR_JARS to one with the list"
            ) from error
        return jars

    def _read_listing(self, listing: Path) -> list[Path]:
        """The jars in the list, if it is for the same coordinates and all of them exist; else empty."""
        try:
            lines = listing.read_text("utf-8").splitlines()
        except FileNotFoundError:
            return []
        if tuple(lines[: len(self.coordinates)]) != self.coordinates:
            return []
        jars = [Path(line) for line in lines[len(self.coordinates) :]]
        return jars if all(jar.is_file() for jar in jars) else []

    def _resolve(self, progress: PrintProgress) -> list[Path]:
        import jgo  # imported here: it is needed once per user and takes 0.2 s

        progress(f"resolving {self.description}")
        try:
            # resolve(), as build() sorts jars into class path and module path, for which it fetches a JDK 11.
            artifacts = jgo.resolve("+".join(self.coordinates), repositories=_repositories())
            jars = []
            for number, artifact in enumerate(artifacts, start=1):
                progress(f"downloading {number}/{len(artifacts)} {artifact.filename}")
                jars.append(Path(artifact.resolve()))
        except (RuntimeError, OSError, ValueError, ElementTree.ParseError) as error:
            raise JarResolutionError(
                f"cannot resolve the jars of {self.name} ({', '.join(self.coordinates)}): {error}. "
                "Check the network and the Maven settings (~/.m2/settings.xml, ~/.config/jgo.conf), "
                f"or {self.alternative}"
            ) from error
        return jars


def mirror_of_central(settings: str) -> str | None:
    """Return the URL of the mirror of Maven's `central` that a Maven settings.xml (its text) names, or None.

    Raises ElementTree.ParseError when the text is not XML.
    """
    for mirror in ElementTree.fromstring(settings).iter():
        if mirror.tag.rpartition("}")[2] != "mirror":
            continue
        fields = {child.tag.rpartition("}")[2]: (child.text or "").strip() for child in mirror}
        patterns = {pattern.strip() for pattern in fields.get("mirrorOf", "").split(",")}
        if "!central" not in patterns and patterns & {"central", "*", "external:*"}:
            return fields.get("url")
    return None


def _repositories() -> dict[str, str]:
    """The repositories in the settings of jgo and Maven; jgo itself does not read those of Maven."""
    from jgo.config import GlobalSettings

    repositories = dict(GlobalSettings.load().repositories)
    settings = Path.home() / ".m2" / "settings.xml"
    if settings.is_file() and (mirror := mirror_of_central(settings.read_text("utf-8"))):
        repositories["central"] = mirror
    return repositories


def read_digests(file: Path) -> dict[str, str]:
    """Read SHA-256 (hexadecimal) by file name from a file in the format of `sha256sum`. Raises OSError, ValueError."""
    found = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition("  ")
        if len(digest) != 64 or not name or name in found:
            raise ValueError(f"{file} has an invalid line, it must be a digest and a name: {line!r}")
        found[name] = digest
    return found
