"""The kustomization of deployment files: one name of the ConfigMap everywhere; and the script that creates Secrets."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployments import CONFIG_TEXTS, deployment, pods, run_file

from infra.deploy.kubernetes.secrets import KAFKA_CA
from pipelines.run.deployment import files_of, plan_of

KUBECTL, KUSTOMIZE = shutil.which("kubectl"), shutil.which("kustomize")
BUILDS = [*([[KUSTOMIZE, "build"]] if KUSTOMIZE else []), *([[KUBECTL, "kustomize"]] if KUBECTL else [])]
"""Commands that print the resources of a kustomization."""
COMPLETED = {"Deployment", "StatefulSet", "DaemonSet", "Job", "Pod"}
"""Kinds in which kustomize itself completes the names of ConfigMaps."""


@pytest.fixture(params=CONFIG_TEXTS)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return run_file(tmp_path, request.param)


def written(file: Path, folder: Path) -> Path:
    """The folder `kubernetes` of the deployment files of `file`."""
    for name, text in files_of(plan_of(file)).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "kubernetes"


def config_maps(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Where a manifest names ConfigMaps, as paths of a kustomization have it, and the names."""
    if isinstance(value, list):
        for each in value:
            yield from config_maps(each, path)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key == "configMap":
                yield f"{path}configMap/name", each["name"]
            yield from config_maps(each, f"{path}{key}/")


def test_config_map_is_named_where_kustomize_completes_it(file: Path, tmp_path: Path) -> None:
    folder = written(file, tmp_path / "files")
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    configured = [yaml.safe_load((folder / name).read_text()) for name in kustomization.get("configurations", ())]
    rules = [rule for each in configured for rule in each["nameReference"] if rule["kind"] == "ConfigMap"]
    completed = {(spec["kind"], spec["path"]) for rule in rules for spec in rule["fieldSpecs"]}
    (generator,) = kustomization["configMapGenerator"]
    for document in deployment(file):
        for path, name in config_maps(document):
            assert name == generator["name"]
            assert document["kind"] in COMPLETED or (document["kind"], path) in completed


@pytest.mark.skipif(not BUILDS, reason="neither kustomize nor kubectl is installed")
def test_kustomization_mounts_the_config_map_that_it_creates(file: Path, tmp_path: Path) -> None:
    folder = written(file, tmp_path / "files")
    for command in BUILDS:
        text = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=True).stdout
        documents = list(yaml.safe_load_all(text))
        assert len(documents) == len(deployment(file)) + 1
        (created,) = (each["metadata"]["name"] for each in documents if each["kind"] == "ConfigMap")
        assert {name for each in documents for _, name in config_maps(each)} == {created}


def test_kafka_users_get_the_certificate_of_its_authority(tmp_path: Path) -> None:
    script, files = (
        written(run_file(tmp_path, "authenticated"), tmp_path / "files") / "secrets.sh",
        tmp_path / "secrets",
    )
    files.mkdir()
    (tmp_path / "kubectl").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "kubectl").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def secrets_with_it() -> set[str]:
        done = subprocess.run(
            ["sh", str(script), str(files)], env=environment, capture_output=True, text=True, check=True
        )
        return {words[3] for words in map(str.split, done.stdout.splitlines()) if f"--from-file={KAFKA_CA}" in words}

    assert secrets_with_it() == set()
    (files / KAFKA_CA).write_text("x")
    assert "laminar-deployed-relay-files" in script.read_text()
    users = {"admin", "people", "export", *(unit.name for unit in plan_of(run_file(tmp_path, "authenticated")).units)}
    assert secrets_with_it() == {f"laminar-deployed-kafka-{user}" for user in users}


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
def test_secrets_script_creates_what_pods_mount(file: Path, tmp_path: Path) -> None:
    script, files = written(file, tmp_path / "files") / "secrets.sh", tmp_path / "secrets"
    files.mkdir()
    for word in script.read_text().split():
        if word.startswith("--from-file="):
            (files / word.removeprefix("--from-file=")).write_text("x")
    done = subprocess.run(
        ["sh", str(script), str(files), "--dry-run=client", "-o", "name"], capture_output=True, text=True, check=True
    )
    export = yaml.safe_load((script.parent / "export.yaml").read_text())
    mounted = {
        source["secret"]["name"]
        for _, pod in pods([*deployment(file), export])
        for each in pod["volumes"]
        for source in each.get("projected", {}).get("sources", ())
    }
    assert {line.removeprefix("secret/") for line in done.stdout.splitlines()} == mounted
