"""The bill of materials names every package and jar that is pinned, with licence and hashes."""

from __future__ import annotations

import re
from pathlib import Path

from infra.bill_of_materials import UNKNOWN, SbomComponent, components, installed_packages, notice, packages, sbom
from infra.kafka.broker_jars import JARS as KAFKA
from infra.maven import read_digests
from infra.runners.flink_jars import JARS as FLINK

ROOT = Path(__file__).parents[2]
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\\\]+)", re.MULTILINE)


def test_every_requirement_is_pinned_with_hashes() -> None:
    for file in ("requirements.txt", "requirements-uv.txt"):
        text = (ROOT / file).read_text()
        entries = [each for each in re.split(r"\n(?=[A-Za-z0-9])", text) if each.strip()]
        assert entries
        assert not [each.partition(" ")[0] for each in entries if "==" not in each or "--hash=sha256:" not in each]


def test_bill_of_materials_has_all_pinned_components() -> None:
    parts = components(ROOT / "requirements.txt")
    pinned = dict(PINNED.findall((ROOT / "requirements.txt").read_text()))
    assert {each.name: each.version for each in parts if each.kind == "python"} == pinned
    digests = {digest for jars in (KAFKA, FLINK) for digest in read_digests(jars.digest_file).values()}
    assert {digest for each in parts if each.kind == "jar" for digest in each.sha256} == digests
    document = sbom(parts)
    assert (document["bomFormat"], len(document["components"])) == ("CycloneDX", len(parts))
    assert all(each["licenses"] for each in document["components"])
    assert "apache-beam 2.77.0: Apache" in notice(parts)


def test_bill_of_materials_has_installed_packages_with_hashes() -> None:
    pinned = {each.purl: each for each in packages(ROOT / "requirements.txt")}
    other = SbomComponent("python", "pytest", "0.1", "pkg:pypi/pytest@0.1", UNKNOWN, ("0" * 64,))
    found = {each.name: each for each in installed_packages([*pinned.values(), other])}
    assert found["apache-beam"] == pinned[found["apache-beam"].purl]
    assert "laminar-rl" not in found
    assert other.sha256 != found["pytest"].sha256


def test_notice_of_the_repository_is_current() -> None:
    text = (ROOT / "NOTICE").read_text()
    pinned = PINNED.findall((ROOT / "requirements.txt").read_text())
    missing = [f"{name} {version}" for name, version in pinned if f"  {name} {version}: " not in text]
    assert not missing, "regenerate it: make sbom"
    assert UNKNOWN not in text  # add it to READ
