"""The software bill of materials of the project, and NOTICE, which names every licence.

    python -m infra.bill_of_materials [--installed] [DIR]

writes `sbom.cdx.json` (CycloneDX 1.6) and `NOTICE` to DIR: the Python packages of requirements.txt with the hashes that
pip verifies, the jars with the SHA-256 that are verified before they run, and the sources of Prism. With `--installed`,
as for an image, the Python packages are those of this environment: extras have more than requirements.txt, and packages
for other systems are missing.
"""

from __future__ import annotations

import argparse
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any

from infra.kafka.broker_jars import JARS as KAFKA
from infra.maven import Jars, read_digests
from infra.runners.flink_jars import JARS as FLINK

PROJECT = "laminar-rl"
UNKNOWN = "not stated"
READ = {
    "atheris": "Apache-2.0",
    "colorama": "BSD-3-Clause",
    "cuda-toolkit": "NVIDIA CUDA Toolkit End User License Agreement",
    "httpx2-jsfetch": "BSD-3-Clause",
    "tzdata": "Apache-2.0",
    "zss": "BSD-3-Clause",
}
"""Licences read from the files of packages whose metadata states none, or which only other systems install."""
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_MAX_LICENCE_CHARACTERS = 80


@dataclass(frozen=True)
class SbomComponent:
    """One component: package URL, version, licence as stated by its authors, and the SHA-256 of its files."""

    kind: str
    name: str
    version: str
    purl: str
    licence: str
    sha256: tuple[str, ...] = ()


def packages(requirements: Path) -> Iterator[SbomComponent]:
    """The pinned Python packages; those for other systems are not installed here."""
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


def installed_packages(pinned: Iterable[SbomComponent]) -> Iterator[SbomComponent]:
    """The Python packages of this environment, with the hashes of those that are `pinned` in the same version."""
    hashes = {each.purl: each.sha256 for each in pinned}
    for found in distributions():
        name = re.sub(r"[-_.]+", "-", found.name).lower()
        if name != PROJECT:
            purl = f"pkg:pypi/{name}@{found.version}"
            yield SbomComponent("python", name, found.version, purl, _licence(name), hashes.get(purl, ()))


def jars(of: Jars) -> Iterator[SbomComponent]:
    """The jars of `of`, with the licences of their POMs if they have been downloaded."""
    paths = {jar.name: jar for jar in of.resolve()} if of.is_resolved() else {}
    for name, digest in read_digests(of.digest_file).items():
        path = paths.get(name)
        if path is None:
            yield SbomComponent("jar", name, UNKNOWN, f"pkg:generic/{name}", UNKNOWN, (digest,))
            continue
        version, artifact = path.parent.name, path.parent.parent.name
        parts = path.parent.parent.parent.parts
        group = ".".join(parts[parts.index("repository") + 1 :] if "repository" in parts else parts[-2:])
        purl = f"pkg:maven/{group}/{artifact}@{version}"
        yield SbomComponent(
            "jar", f"{group}:{artifact}", version, purl, _pom_licence(path.with_suffix(".pom")), (digest,)
        )


def components(requirements: Path, *, installed: bool = False) -> list[SbomComponent]:
    """All components, sorted by kind and name; the Python packages are those of `requirements`, or `installed` ones."""
    from infra.runners.prism import VERSION

    prism = SbomComponent(
        "go", "prism", VERSION, f"pkg:golang/github.com/apache/beam/sdks/v2@v{VERSION}", "Apache-2.0 (built on demand)"
    )
    pinned = list(packages(requirements))
    python = installed_packages(pinned) if installed else pinned
    found = {each.purl: each for each in (*python, *jars(KAFKA), *jars(FLINK), prism)}
    return sorted(found.values(), key=lambda each: (each.kind, each.name.lower()))


def sbom(parts: Sequence[SbomComponent]) -> dict[str, Any]:
    """The CycloneDX document of `parts`."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": PROJECT, "licenses": [_licence_entry("Apache-2.0")]}},
        "components": [
            {
                "type": "library",
                "bom-ref": each.purl,
                "name": each.name,
                "version": each.version,
                "purl": each.purl,
                "licenses": [_licence_entry(each.licence)],
                "hashes": [{"alg": "SHA-256", "content": digest} for digest in each.sha256],
            }
            for each in parts
        ],
    }


def notice(parts: Sequence[SbomComponent]) -> str:
    """The text of NOTICE: each component and its licence."""
    head = (
        "Laminar\n\nLicensed under the Apache License, Version 2.0 (LICENSE). It uses the following software, none of\n"
        "which is part of this repository, each under the licence that its authors state. Generated by `make sbom`.\n"
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


def _licence_entry(licence: str) -> dict[str, Any]:
    return {"license": {"name": licence}}


def _licence(name: str) -> str:
    try:
        stated = _licence_of(distribution(name))
    except PackageNotFoundError:
        stated = UNKNOWN
    return READ.get(name, stated) if stated == UNKNOWN else stated


def _licence_of(package: Distribution) -> str:
    about = package.metadata
    for expression in about.get_all("License-Expression") or []:
        return str(expression)
    kinds = [each.rpartition(" :: ")[2] for each in about.get_all("Classifier") or [] if each.startswith("License ::")]
    stated = str((about.get_all("License") or [""])[0]).strip().partition("\n")[0]
    return "; ".join(kinds) or (stated if 0 < len(stated) <= _MAX_LICENCE_CHARACTERS else UNKNOWN)


def _pom_licence(pom: Path) -> str:
    """The licences stated in a POM, or in a downloaded parent POM from which it inherits them."""
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
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--installed", action="store_true")
    options.add_argument("target", metavar="DIR", nargs="?", type=Path, default=Path("."))
    given = options.parse_args()
    target, found = given.target, components(Path("requirements.txt"), installed=given.installed)
    (target / "sbom.cdx.json").write_text(json.dumps(sbom(found), indent=1) + "\n", encoding="utf-8")
    (target / "NOTICE").write_text(notice(found), encoding="utf-8")
    without_licence = sum(each.licence.startswith(UNKNOWN) for each in found)
    print(
        f"{len(found)} components, {without_licence} without a stated licence: "
        f"{target / 'sbom.cdx.json'}, {target / 'NOTICE'}"
    )
