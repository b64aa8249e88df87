"""Where this machine finds the weight versions of a run: weight store, disk, object store, models, checkpoints."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from infra.models.checkpoint_list import list_checkpoints
from infra.storage import StorageFolder, open_storage
from infra.store.names import default_root, version_of, weight_file
from infra.store.sealed_objects import sealed_versions
from pipelines.inspect.run_folders import config_file
from schemas.records import PolicyVersion, WeightVersion

Kind = Literal["store", "disk", "object store", "model", "checkpoint", "initial model"]
_EARLIER_MODEL = re.compile(r"model-(\d+)")


@dataclass(frozen=True)
class WeightPlace:
    """A place of a version: the file of the weight store or of a copy on disk or in an object store, a Hugging Face
    folder, or a checkpoint of the trainer."""

    kind: Kind
    path: StorageFolder

    def __str__(self) -> str:
        return str(self.path) if self.kind in ("model", "checkpoint") else self.kind


Places = Mapping[PolicyVersion, list[WeightPlace]]


def weight_places(
    manifests: Iterable[WeightVersion], run: str, folder: Path | None, store: Path | None = None
) -> Places:
    """The places of each version of `run`, those with the least work first; versions without a place are missing.

    `folder` is the run's on this machine, if it has one; `store` replaces the weight store that it names. Raises
    OSError if an object store refuses.
    """
    known = sorted(manifests, key=lambda manifest: manifest.version)
    config = _read_config(folder)
    found: dict[PolicyVersion, list[WeightPlace]] = {}
    for version, place in (
        *_stored(store or _store_of(config, run)),
        *_copied(config, run),
        *_objects(config, run),
        *_models(known, folder),
        *_checkpoints(config, run, folder),
        *_initial(known, config),
    ):
        found.setdefault(version, []).append(place)
    return found


def _read_config(folder: Path | None) -> Mapping[str, Any]:
    """The configuration of the run in `folder` as a table: the commands that list versions start without pydantic."""
    file = None if folder is None else config_file(folder)
    return {} if file is None else tomllib.loads(file.read_text("utf-8"))


def _store_of(config: Mapping[str, Any], run: str) -> Path:
    configured = config.get("relay", {}).get("store", "auto")
    return default_root(run) if configured in ("", "auto") else Path(configured)


def _stored(store: Path) -> Iterator[tuple[PolicyVersion, WeightPlace]]:
    for file in sorted(store.iterdir()) if store.is_dir() else []:
        if (version := version_of(file.name)) is not None:
            yield version, WeightPlace("store", file)


def copies_of(run: str, folder: Path | None) -> list[Path]:
    """The folders of the copies that relays of `run` have on this machine's disk; `folder` is the run's."""
    return _copies_of(_read_config(folder), run)


def _copies_of(config: Mapping[str, Any], run: str) -> list[Path]:
    configured = config.get("relay", {}).get("disk_folder", "")
    return sorted((Path(configured) / run).glob("relay-*")) if configured else []


def _copied(config: Mapping[str, Any], run: str) -> Iterator[tuple[PolicyVersion, WeightPlace]]:
    for relay in _copies_of(config, run):
        yield from ((version, WeightPlace("disk", place.path)) for version, place in _stored(relay))


def _objects(config: Mapping[str, Any], run: str) -> Iterator[tuple[PolicyVersion, WeightPlace]]:
    if configured := config.get("relay", {}).get("object_store", ""):
        folder = open_storage(configured) / run
        for version in sealed_versions(folder):
            yield version, WeightPlace("object store", folder / weight_file(version))


def _checkpoints(
    config: Mapping[str, Any], run: str, folder: Path | None
) -> Iterator[tuple[PolicyVersion, WeightPlace]]:
    named = config.get("trainer", {}).get("checkpoint_folder", "")
    root = open_storage(named) / run if named else None if folder is None else folder / "checkpoints"
    for each in [] if root is None else list_checkpoints(root):
        yield PolicyVersion.parse(each.name), WeightPlace("checkpoint", each)


def _initial(known: list[WeightVersion], config: Mapping[str, Any]) -> Iterator[tuple[PolicyVersion, WeightPlace]]:
    path = config.get("model", {}).get("path", "")
    if path and Path(path).is_dir():
        yield from ((each.version, WeightPlace("initial model", Path(path))) for each in known if each.step == 0)


def _models(known: list[WeightVersion], folder: Path | None) -> Iterator[tuple[PolicyVersion, WeightPlace]]:
    """The final model, and those of earlier goals of an extended run: `model-STEPS`."""
    if folder is None or not folder.is_dir():
        return
    newest_of_step = {manifest.step: manifest.version for manifest in known}
    final = [manifest.version for manifest in known if manifest.final]
    if final and (folder / "model").is_dir():
        yield final[-1], WeightPlace("model", folder / "model")
    for each in sorted(folder.iterdir()):
        match = _EARLIER_MODEL.fullmatch(each.name)
        if match is not None and (version := newest_of_step.get(int(match[1]))) is not None:
            yield version, WeightPlace("model", each)
