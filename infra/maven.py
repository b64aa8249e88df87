"""Java class paths: resolved once per user by their Maven coordinates, then read from a list.

`jgo` is the only part that talks to a repository, and only when the list is missing or a jar in it is gone. It keeps
the jars in the user's Maven repository (`M2_REPO`, or `~/.m2/repository`), which other programs write to, too: so every
jar is checked against our list of SHA-256, `infra/jars/NAME.sha256`, each time before Java is given it.
`python -m infra.jars` writes those lists anew from what is resolved, for whoever changes a version.
"""

from __future__ import annotations

import hashlib
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from infra.processes import locked

LISTING = "class-path.txt"
Progress = Callable[[str], None]


class JarResolutionError(RuntimeError):
    """Jars could not be resolved or fetched."""


class WrongJar(JarResolutionError):
    """A jar is not the one that this project was tested with."""


@dataclass(frozen=True)
class Jars:
    """The jars of `coordinates` and all that these depend on, under `name` in the user's cache.

    `what` they are is told while they are fetched, `otherwise` what else can be done where they cannot be.
    """

    name: str
    what: str
    coordinates: tuple[str, ...]
    otherwise: str
    digests: Path | None = None
    """The file with their SHA-256, as `sha256sum` writes it; None: the one of that name in `infra/jars`."""

    @property
    def digest_file(self) -> Path:
        """Where the SHA-256 of each jar is written."""
        return self.digests or Path(__file__).with_name("jars") / f"{self.name}.sha256"

    @property
    def folder(self) -> Path:
        """Where the list is kept between runs."""
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        return Path(base) / "laminar" / self.name

    def is_resolved(self) -> bool:
        """Whether the list is there, so that nothing need be fetched."""
        return (self.folder / LISTING).is_file()

    def class_path(self, progress: Progress = lambda message: None, cache: Path | None = None) -> list[Path]:
        """The jars, resolved and fetched if this user lacks them, each with the SHA-256 that our list has for it.

        `progress` gets one line of text a step, only when there is something to fetch. Raises JarResolutionError when a
        jar can be neither found nor fetched, WrongJar for one that is another than ours.
        """
        jars = self.resolve(progress, cache)
        self.check(jars)
        return jars

    def check(self, jars: Iterable[Path]) -> None:
        """Raise WrongJar where `jars` are not exactly those of the list, byte by byte."""
        expected = read_digests(self.digest_file)
        for jar in jars:
            wanted = expected.pop(jar.name, None)
            if wanted is None:
                raise WrongJar(f"{jar} is none of the jars that {self.name} is made of ({self.digest_file})")
            if (found := sha256_of(jar)) != wanted:
                raise WrongJar(
                    f"{jar} has SHA-256 {found}, and {self.digest_file.name} says {wanted}: it is not run. Remove it, "
                    "and it is fetched again; if it comes back wrong, the repository it comes from is not to be trusted"
                )
        if expected:
            raise WrongJar(f"{self.name} lacks {', '.join(sorted(expected))} ({self.digest_file})")

    def resolve(self, progress: Progress = lambda message: None, cache: Path | None = None) -> list[Path]:
        """As `class_path`, unchecked."""
        folder = self.folder if cache is None else cache
        listing = folder / LISTING
        if known := self._listed(listing):
            return known
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock"):
            if known := self._listed(listing):  # another process has done it while this one waited
                return known
            jars = self._resolve(progress)
            temporary = listing.with_suffix(".tmp")
            temporary.write_text("\n".join([*self.coordinates, *map(str, jars)]) + "\n")
            temporary.rename(listing)
        return jars

    def _listed(self, listing: Path) -> list[Path]:
        """The jars of a list made for the same coordinates whose jars are all still there, else nothing."""
        try:
            lines = listing.read_text().splitlines()
        except FileNotFoundError:
            return []
        if tuple(lines[: len(self.coordinates)]) != self.coordinates:
            return []
        jars = [Path(line) for line in lines[len(self.coordinates) :]]
        return jars if all(jar.is_file() for jar in jars) else []

    def _resolve(self, progress: Progress) -> list[Path]:
        import jgo  # here, because it is needed once per user and takes 0.2 s to import

        progress(f"resolving {self.what}")
        try:
            # resolve(), as build() sorts jars into class path and module path, for which it fetches a JDK 11.
            artifacts = jgo.resolve("+".join(self.coordinates), repositories=_repositories())
            jars = []
            for number, artifact in enumerate(artifacts, start=1):
                progress(f"fetching {number}/{len(artifacts)} {artifact.filename}")
                jars.append(Path(artifact.resolve()))
        except (RuntimeError, OSError, ValueError, ElementTree.ParseError) as error:
            raise JarResolutionError(
                f"cannot resolve the jars of {self.name} ({', '.join(self.coordinates)}): {error}. "
                "Check the network and the Maven settings (~/.m2/settings.xml, ~/.config/jgo.conf), "
                f"or {self.otherwise}"
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
    """Return the repositories that this machine's jgo and Maven settings name (jgo itself does not read Maven's)."""
    from jgo.config import GlobalSettings

    repositories = dict(GlobalSettings.load().repositories)
    settings = Path.home() / ".m2" / "settings.xml"
    if settings.is_file() and (mirror := mirror_of_central(settings.read_text())):
        repositories["central"] = mirror
    return repositories


def read_digests(file: Path) -> dict[str, str]:
    """SHA-256 in hexadecimal by file name, of a file as `sha256sum` writes it. Raises OSError, ValueError."""
    found = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition("  ")
        if len(digest) != 64 or not name or name in found:
            raise ValueError(f"{file} has a line that is no digest and name: {line!r}")
        found[name] = digest
    return found


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
