"""The user's files that a run reads, by their content: a resumed run must read what it has read before."""

from __future__ import annotations

import ast
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

from blake3 import blake3

from infra.files import write_atomically
from infra.workers.limits import OWN_FOLDERS
from pipelines.config import Config
from pipelines.config_paths import TARGETS, script_of
from pipelines.inspect.run_folders import run_command
from pipelines.run.learnability import is_warm_start
from pipelines.run.paths import files_read, map_paths

INPUTS_FILE = "inputs.json"
"""The fingerprints of the files that a run reads, and which changes of them were accepted."""
SECTIONS = frozenset({"prompts", "rollout", "score", "experience", "trainer", "agents", "model"})
"""Sections whose files decide the run's records. Secrets and certificates of others may change at any time."""
WHOLE_BYTES = 64 << 20
"""A larger file counts by its size and `SAMPLES` parts of it: weights have hundreds of gigabytes."""
SAMPLES = 64
SAMPLE_BYTES = 64 << 10


def record_inputs(config: Config, file: Path, sections: Set[str] = SECTIONS) -> None:
    """Write to `file` what the `sections` of `config` read."""
    _write(config, file, sections, [])


def changed_inputs(config: Config, file: Path, sections: Set[str] = SECTIONS) -> list[str]:
    """The differences from what `file` has recorded, a line each; none without a record (of an earlier release)."""
    if not file.exists():
        return []
    before, now = _read(file)["files"], _fingerprints(config, sections)
    changed = [path for path in before if now.get(path) != before[path]]
    lines = [f"{path} {'has changed' if path in now else 'is missing'}" for path in changed]
    return [*lines, *(f"{path} is new" for path in now if path not in before)]


def accept_inputs(config: Config, file: Path, changes: Sequence[str], sections: Set[str] = SECTIONS) -> None:
    """Record the files as they are now, and that their `changes` were accepted."""
    _write(config, file, sections, [*_read(file)["accepted"], {"at": time.time(), "changes": list(changes)}])


def set_options(settings: Sequence[str]) -> str:
    """The options of a command with `settings`."""
    return " ".join(f"--set {shlex.quote(each)}" for each in settings)


def changed_text(folder: Path, changed: Sequence[str], settings: Sequence[str] = ()) -> str:
    """Why the run in `folder` is not resumed with `settings` after the changes `changed`, which follow a line each."""
    command = run_command(folder, "runs resume", f"{set_options(settings)} --accept-changes".strip())
    return "\n".join(
        [
            f"{len(changed)} of the files that the run reads are not as they were at its start, and its records were "
            f"made with the old ones: restore them, start a new run, or accept the new ones: `{command}`",
            *(f"  {each}" for each in changed),
        ]
    )


def _write(config: Config, file: Path, sections: Set[str], accepted: Sequence[Any]) -> None:
    write_atomically(file, json.dumps({"files": _fingerprints(config, sections), "accepted": accepted}, indent=1))


def _read(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text("utf-8")))
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}; delete it to accept the files as they are") from error


def _fingerprints(config: Config, sections: Set[str]) -> dict[str, str]:
    """The fingerprint of each file that the `sections` of `config` read."""
    files = dict.fromkeys(_files(config, sections))
    return {str(file): _fingerprint(file) for file in files if file.is_file()}


def _files(config: Config, sections: Set[str]) -> Iterator[Path]:
    if "model" in sections and config.model.path and not is_warm_start(config):
        yield from _inside(Path(config.model.path))
    if "agents" in sections and config.agents is not None:
        yield from (Path(word).absolute() for word in config.agents.command if Path(word).is_file())
    for key, path in files_read(config):
        if _is_of(key, sections):
            yield from _with_imports(path.absolute(), path.absolute().parent) if path.suffix == ".py" else _inside(path)
    for key, target in _modules(config):
        name = target.rpartition(":")[0]
        if _is_of(key, sections) and (file := _module_file(name)) is not None:
            parts = name.split(".")
            root = file.parents[len(parts) - (file.name != "__init__.py")]
            yield from _with_imports(file, root, parts[0])


def _is_of(key: str, sections: Set[str]) -> bool:
    """Whether one of `sections` reads what `key` names. Rollouts run the environments that prompts name."""
    readers = {key.partition(".")[0], *(["rollout"] if key.endswith(".environment") else [])}
    return bool(readers & sections & SECTIONS)


def _inside(path: Path) -> Iterator[Path]:
    """The files in the folder `path`, without hidden ones; or the file `path`."""
    if not path.is_dir():
        yield path.absolute()
        return
    for each in sorted(path.absolute().rglob("*")):
        if each.is_file() and not any(part.startswith(".") for part in each.relative_to(path.absolute()).parts):
            yield each


def _fingerprint(file: Path) -> str:
    try:
        size = file.stat().st_size
        digest = blake3(str(size).encode())
        with file.open("rb") as data:
            if size <= WHOLE_BYTES:
                digest.update(data.read())
            else:
                for number in range(SAMPLES):
                    data.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                    digest.update(data.read(SAMPLE_BYTES))
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return digest.hexdigest()[:32]


def _modules(config: Config) -> list[tuple[str, str]]:
    """The hooks `module:name` of `config`, each with its key."""
    found: list[tuple[str, str]] = []

    def collect(key: str, text: Any) -> Any:
        if key in TARGETS and ":" in text and not script_of(text):
            found.append((key, text))
        return text

    map_paths(config, "", collect)
    return found


def _module_file(name: str) -> Path | None:
    """The source file of module `name`, which is not imported; None for Laminar's own, and if it is unknown."""
    path: Any = None
    spec = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        specs = (find(".".join(parts[:end]), path, None) for find in finders if find is not None)
        spec = next((each for each in specs if each is not None), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    origin = spec.origin if spec is not None else None
    return None if origin is None or origin.startswith(OWN_FOLDERS) else Path(origin)


def _with_imports(file: Path, root: Path, package: str = "") -> Iterator[Path]:
    """`file` and what it imports from the folder `root`, there only from `package` if it is given, and so on."""
    found: dict[Path, None] = {}
    waiting = [file]
    while waiting:
        each = waiting.pop()
        if each not in found and each.is_file():
            found[each] = None
            waiting += _imported(each, root, package)
    yield from found


def _imported(file: Path, root: Path, package: str) -> Iterator[Path]:
    """Where the modules would be that `file` imports from its package or, as `package`, from `root`."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [(root, alias.name) for alias in node.names if _begins(alias.name, package)]
        elif isinstance(node, ast.ImportFrom):
            if not node.level and not _begins(node.module or "", package):
                continue
            folder = root if not node.level else file.parents[node.level - 1]
            names = [(folder, node.module or "")]
            names += [(folder, f"{node.module or ''}.{alias.name}".lstrip(".")) for alias in node.names]
        else:
            continue
        for folder, name in names:
            if name:
                place = folder.joinpath(*name.split("."))
                yield from (place.with_name(f"{place.name}.py"), place / "__init__.py")


def _begins(name: str, package: str) -> bool:
    return not package or name.partition(".")[0] == package
