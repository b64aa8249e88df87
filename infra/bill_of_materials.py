"""What the project is made of: a software bill of materials, and NOTICE, which names every licence.

    python -m infra.bill_of_materials [DIR]

writes `sbom.cdx.json` (CycloneDX 1.6) and `NOTICE` to DIR: Python packages of requirements.txt, with the hashes that
an installation checks; the jars, with the SHA-256 that are checked before they run; Prism's sources.
"""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from infra.kafka.broker_jars import JARS as KAFKA
from infra.maven import Jars, read_digests
from infra.runners.flink_jars import JARS as FLINK

UNKNOWN = "not stated"
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_LONGEST = 80


@dataclass(frozen=True)
class SbomComponent:
    """One part: its package URL, version, licence as its maker states it, and the SHA-256 of its files."""

    kind: str
    name: str
    version: str
    purl: str
    licence: str
    sha256: tuple[str, ...] = ()


def packages(requirements: Path) -> Iterator[SbomComponent]:
    """The pinned Python packages that are installed here; those for other systems have no licence to read."""
    name = version = ""
    hashes: list[str] = []
    for line in [*requirements.read_text(encoding="utf-8").splitlines(), "end==0"]:
        if found := _PINNED.match(line):
            if name:
                yield SbomComponent(
                    "python", name, version, f"pkg:pypi/{name}@{version}", _licence(name), tuple(hashes)
                )
            name, version, hashes = found[1], found[2], []
        hashes += _HASH.findall(line)


def jars(of: Jars) -> Iterator[SbomComponent]:
    """The jars of `of`, with the licences of their POMs where they have been fetched."""
    paths = {jar.name: jar for jar in of.resolve()} if of.is_resolved() else {}
    for name, digest in read_digests(of.digest_file).items():
        path = paths.get(name)
        if path is None:
            yield SbomComponent("jar", name, UNKNOWN, f"pkg:generic/{name}", UNKNOWN, (digest,))
            continue
        version, artifact = path.parent.name, path.parent.parent.name
        group = ".".join(_below_repository(path.parent.parent.parent))
        purl = f"pkg:maven/{group}/{artifact}@{version}"
        yield SbomComponent(
            "jar", f"{group}:{artifact}", version, purl, _pom_licence(path.with_suffix(".pom")), (digest,)
        )


def components(requirements: Path) -> list[SbomComponent]:
    """All of them, by kind and name."""
    from infra.runners.prism import VERSION

    prism = SbomComponent(
        "go", "prism", VERSION, f"pkg:golang/github.com/apache/beam/sdks/v2@v{VERSION}", "Apache-2.0 (built on demand)"
    )
    found = {each.purl: each for each in (*packages(requirements), *jars(KAFKA), *jars(FLINK), prism)}
    return sorted(found.values(), key=lambda each: (each.kind, each.name.lower()))


def sbom(parts: Sequence[SbomComponent]) -> dict[str, Any]:
    """The CycloneDX document of `parts`."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "laminar-rl", "licenses": [_named("Apache-2.0")]}},
        "components": [
            {
                "type": "library",
                "bom-ref": each.purl,
                "name": each.name,
                "version": each.version,
                "purl": each.purl,
                "licenses": [_named(each.licence)],
                "hashes": [{"alg": "SHA-256", "content": digest} for digest in each.sha256],
            }
            for each in parts
        ],
    }


def notice(parts: Sequence[SbomComponent]) -> str:
    """NOTICE: what is used, and under which licence."""
    head = (
        "Laminar\n\nLicensed under the Apache License, Version 2.0 (LICENSE). It uses the following software, none of\n"
        "which is part of this repository, each under the licence that its makers state. Made by `make sbom`.\n"
    )
    titles = {
        "python": "Python packages",
        "jar": "Jars (Apache Kafka; Flink with Beam's job server)",
        "go": "Go",
    }
    lines = [head]
    for kind, title in titles.items():
        lines += [
            f"\n{title}\n",
            *(f"  {each.name} {each.version}: {each.licence}\n" for each in parts if each.kind == kind),
        ]
    return "".join(lines)


def _named(licence: str) -> dict[str, Any]:
    return {"license": {"name": licence}}


def _licence(name: str) -> str:
    try:
        return _licence_of(distribution(name))
    except PackageNotFoundError:
        return f"{UNKNOWN} here (not installed on this system)"


def _licence_of(package: Distribution) -> str:
    about = package.metadata
    for expression in about.get_all("License-Expression") or []:
        return str(expression)
    kinds = [each.rpartition(" :: ")[2] for each in about.get_all("Classifier") or [] if each.startswith("License ::")]
    stated = str((about.get_all("License") or [""])[0]).strip().partition("\n")[0]
    return "; ".join(kinds) or (stated if 0 < len(stated) <= _LONGEST else UNKNOWN)


def _below_repository(folder: Path) -> tuple[str, ...]:
    parts = folder.parts
    return parts[parts.index("repository") + 1 :] if "repository" in parts else parts[-2:]


def _pom_licence(pom: Path) -> str:
    """The licences that a POM states, or one of its parents where it inherits them and they have been fetched."""
    for _ in range(6):
        try:
            root = ElementTree.parse(pom).getroot()
        except (OSError, ElementTree.ParseError):
            return UNKNOWN
        names = [(each.text or "").strip() for each in root.findall("{*}licenses/{*}license/{*}name")]
        if names:
            return "; ".join(names)
        parent = {name: root.findtext(f"{{*}}parent/{{*}}{name}") for name in ("groupId", "artifactId", "version")}
        group, artifact, version = parent.values()
        if not (group and artifact and version):
            return UNKNOWN
        repository = next((each for each in pom.parents if each.name == "repository"), pom.parent)
        pom = repository.joinpath(*group.split("."), artifact, version, f"{artifact}-{version}.pom")
    return UNKNOWN


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    made = components(Path("requirements.txt"))
    (target / "sbom.cdx.json").write_text(json.dumps(sbom(made), indent=1) + "\n", encoding="utf-8")
    (target / "NOTICE").write_text(notice(made), encoding="utf-8")
    unstated = sum(each.licence.startswith(UNKNOWN) for each in made)
    print(
        f"{len(made)} components, {unstated} without a stated licence: {target / 'sbom.cdx.json'}, {target / 'NOTICE'}"
    )
