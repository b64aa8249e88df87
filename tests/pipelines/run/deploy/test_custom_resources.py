"""Resources for operators are valid by the schemas of their definitions (definitions/README.md)."""

from __future__ import annotations

import gzip
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from deployments import CONFIG_TEXTS, deployment, run_file

DEFINITIONS = Path(__file__).with_name("definitions")
OPERATORS = ("monitoring.coreos.com", "kafka.strimzi.io", "flink.apache.org")


def definition(kind: str) -> dict[str, Any]:
    """The schema of resources of `kind`."""
    packed = DEFINITIONS / f"{kind}.json.gz"
    text = gzip.decompress(packed.read_bytes()) if packed.exists() else (DEFINITIONS / f"{kind}.json").read_bytes()
    schema: dict[str, Any] = json.loads(text)
    return schema


def custom(name: str, folder: Path) -> list[dict[str, Any]]:
    """The resources of operators of the configuration `name`."""
    found = deployment(run_file(folder, name))
    return [each for each in found if each["apiVersion"].partition("/")[0] in OPERATORS]


@pytest.mark.parametrize("name", CONFIG_TEXTS)
def test_custom_resources_are_valid_by_their_definitions(name: str, tmp_path: Path) -> None:
    for document in custom(name, tmp_path):
        jsonschema.validate(document, definition(document["kind"]))


def test_definitions_reject_unknown_and_wrong_fields(tmp_path: Path) -> None:
    documents = {each["kind"]: each for each in custom("flink", tmp_path)}
    assert documents.keys() == {"FlinkDeployment", "KafkaTopic", "KafkaUser", "ServiceMonitor"}
    pod = ("spec", "taskManager", "podTemplate", "spec", "containers", 1)
    wrong: list[tuple[str, tuple[str | int, ...], str, Any]] = [
        *((kind, ("spec",), "unknown", 1) for kind in documents),
        ("FlinkDeployment", ("spec",), "mode", "sidecar"),
        ("FlinkDeployment", ("spec", "jobManager"), "replicas", "one"),
        ("FlinkDeployment", pod, "imagePull", "Always"),
        ("KafkaTopic", ("spec",), "partitions", 0),
        ("KafkaUser", ("spec", "authorization", "acls", 0), "operations", ["Peek"]),
        ("ServiceMonitor", ("spec", "endpoints", 0), "interval", 15),
    ]
    for kind, path, field, value in wrong:
        document = deepcopy(documents[kind])
        at: Any = document
        for key in path:
            at = at[key]
        at[field] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(document, definition(kind))
