"""The jars of the local broker: resolved once per user by their Maven coordinates, then read from a list.

`jgo` is the only part that talks to a repository, and only when the list is missing or a jar in it is gone. It keeps
the jars in the user's Maven repository (`M2_REPO`, or `~/.m2/repository`).
"""

from __future__ import annotations

import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

from infra.kafka.processes import locked

KAFKA_VERSION = "4.3.1"
# kafka-clients is named as well because the resolver otherwise takes an older one from a dependency's dependency.
COORDINATES = (
    f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}",
    f"org.apache.kafka:kafka-clients:{KAFKA_VERSION}",
    "org.apache.logging.log4j:log4j-slf4j-impl:2.25.2",
)

Progress = Callable[[str], None]


class JarResolutionError(RuntimeError):
    """The broker's jars could not be resolved or fetched."""


def cache_dir() -> Path:
    """Return the folder of the current user in which what the local broker needs is kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "laminar" / f"kafka-{KAFKA_VERSION}"


def class_path(progress: Progress = lambda message: None, cache: Path | None = None) -> list[Path]:
    """Return the jars of the broker's Java class path, resolving and fetching them if this user lacks them.

    `progress` gets one line of text a step, only when there is something to fetch (10-15 s the first time).
    Raises JarResolutionError when a jar can be neither found nor fetched.
    """
    folder = cache_dir() if cache is None else cache
    listing = folder / "class-path.txt"
    if known := _read_listing(listing):
        return known
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        if known := _read_listing(listing):  # another process has done it while this one waited
            return known
        jars = _resolve(progress)
        temporary = listing.with_suffix(".tmp")
        temporary.write_text("\n".join([*COORDINATES, *map(str, jars)]) + "\n")
        temporary.rename(listing)
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


def _read_listing(listing: Path) -> list[Path]:
    """Return the jars of a listing made for the same coordinates whose jars are all still there, else nothing."""
    try:
        lines = listing.read_text().splitlines()
    except FileNotFoundError:
        return []
    if tuple(lines[: len(COORDINATES)]) != COORDINATES:
        return []
    jars = [Path(line) for line in lines[len(COORDINATES) :]]
    return jars if all(jar.is_file() for jar in jars) else []


def _resolve(progress: Progress) -> list[Path]:
    import jgo  # here, because it is needed once per user and takes 0.2 s to import

    progress(f"resolving Apache Kafka {KAFKA_VERSION} (about 43 MB of jars, once per user)")
    try:
        # resolve() and not build(): build() sorts jars into class path and module path, for which it fetches a JDK 11.
        artifacts = jgo.resolve("+".join(COORDINATES), repositories=_repositories())
        jars = []
        for number, artifact in enumerate(artifacts, start=1):
            progress(f"fetching {number}/{len(artifacts)} {artifact.filename}")
            jars.append(Path(artifact.resolve()))
    except (RuntimeError, OSError, ValueError, ElementTree.ParseError) as error:
        raise JarResolutionError(
            f"cannot resolve the local broker's jars ({', '.join(COORDINATES)}): {error}. "
            "Check the network and the Maven settings (~/.m2/settings.xml, ~/.config/jgo.conf), "
            "or use a broker that is already running: --kafka_bootstrap_servers"
        ) from error
    return jars


def _repositories() -> dict[str, str]:
    """Return the repositories that this machine's jgo and Maven settings name (jgo itself does not read Maven's)."""
    from jgo.config import GlobalSettings

    repositories = dict(GlobalSettings.load().repositories)
    settings = Path.home() / ".m2" / "settings.xml"
    if settings.is_file() and (mirror := mirror_of_central(settings.read_text())):
        repositories["central"] = mirror
    return repositories
