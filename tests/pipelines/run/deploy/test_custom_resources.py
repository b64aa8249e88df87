"""Resources for operators are valid by the schemas of their definitions, which are not in this repository.

LAMINAR_CRD_CATALOG names a checkout of https://github.com/datreeio/CRDs-catalog.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import jsonschema
import pytest
from deployments import CONFIG_TEXTS, deployment, run_file

CATALOG = os.environ.get("LAMINAR_CRD_CATALOG", "")
OPERATORS = {"monitoring.coreos.com", "kafka.strimzi.io", "flink.apache.org"}


@pytest.mark.skipif(not CATALOG, reason="LAMINAR_CRD_CATALOG is not set")
@pytest.mark.parametrize("name", CONFIG_TEXTS)
def test_custom_resources_are_valid_by_their_definitions(name: str, tmp_path: Path) -> None:
    for document in deployment(run_file(tmp_path, name)):
        group, _, version = document["apiVersion"].rpartition("/")
        if group in OPERATORS:
            schema = json.loads((Path(CATALOG) / group / f"{document['kind'].lower()}_{version}.json").read_text())
            jsonschema.validate(document, schema)
