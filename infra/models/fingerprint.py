"""A digest by which processes on several machines check that their model folders have the same model."""

from __future__ import annotations

import json
from pathlib import Path

from blake3 import blake3

from infra.store.weight_files import folder_tensors


def model_fingerprint(folder: Path) -> str:
    """The BLAKE3 (hex) of the config in `folder`, and of the names, dtypes and shapes of its tensors.

    Raises FileNotFoundError if the config or a weight file is missing, ValueError for an invalid one.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    digest = blake3(json.dumps(config, sort_keys=True).encode())
    for name, (spec, _) in sorted(folder_tensors(folder).items()):
        digest.update(f"\0{name} {spec.dtype} {list(spec.shape)}".encode())
    return digest.hexdigest()
