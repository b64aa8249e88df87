"""Every configuration key with its type, default, unit and meaning, read from the configuration classes.

The source of `laminar config`, `docs/configuration.md` and the JSON Schema for editors.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from infra.setting_types import bounds_of, requirement
from pipelines.config import Config, parse_config
from pipelines.config_draft import adapter

UNITS: Mapping[str, str] = {
    "_s": "seconds",
    "_ms": "milliseconds",
    "_us": "microseconds",
    "_ns": "nanoseconds",
    "_hours": "hours",
    "_mb": "MiB",
    "_gib": "GiB",
    "_megabytes": "MB",
    "_megabytes_per_s": "MB/s",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_chars": "characters",
    "_steps": "batches",
    "_batches": "batches",
}
"""The unit of a number by the suffix of its key; the longest matching suffix counts."""
KEY_UNITS: Mapping[str, str] = {
    "run.stop_error_window": "trajectories",
    "prompts.heldout": "questions",
    "warm_start.measured": "questions",
    "warm_start.steps": "updates",
    "warm_start.warmup": "updates",
    "warm_start.habit_steps": "updates",
    "warm_start.measure_every": "updates",
    "warm_start.model.max_positions": "tokens",
    "rollout.context": "tokens",
    "rollout.kv_capacity": "tokens",
    "rollout.slots": "trajectories",
    "rollout.emulation.stride": "tokens",
    "rollout.emulation.block": "tokens",
    "rollout.emulation.round_prefill": "tokens",
    "rollout.emulation.roofline.decode_context": "tokens",
    "rollout.emulation.lengths.p50": "tokens",
    "rollout.emulation.lengths.p99": "tokens",
    "rollout.environments[].seconds": "seconds",
    "placement.replica_batch": "trajectories",
    "experience.global_batch": "trajectories",
    "experience.max_staleness": "versions",
    "trainer.checkpoint_every": "batches",
    "trainer.keep_every": "batches",
    "trainer.lost_batches": "",
    "trainer.learner.mini_batches": "optimizer steps",
    "trainer.learner.mismatch_bound": "nats per token",
    "evaluation.every": "versions",
    "evaluation.periodic_questions": "questions",
}
"""Units of keys whose suffix names none, or another one."""
_SIMPLE: Mapping[Any, str] = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
    Any: "value",
}


_HEAD = """# Configuration reference

Every key of a run's TOML file. `laminar config --explain KEY` prints the same; `--set section.key=value` changes one
key for a run. This page is generated: `python -m pipelines.config_reference > docs/configuration.md`.

Relative paths in the file, of data, models, code and secrets, begin at the folder of the file; those of `--set`, and of
the folders that a run writes (such as `run.folder`), at the working directory.

One step of training is one batch, in which the optimizer may take several steps (`trainer.learner.mini_batches` and
`epochs`): `trainer.optimizer_steps` and `trainer.learner.warmup_steps` count batches.

`unset` marks an optional key without a default: leave it out. A section whose name ends in `[]` is an array of
tables (`[[...]]`)."""


@dataclass(frozen=True)
class Section:
    """A table of the configuration: its dotted `key`, which ends in `[]` for an array of tables.

    `optional`: a file without the section differs from one with an empty section.
    """

    key: str
    about: str
    settings: tuple[Setting, ...]
    optional: bool = False

    @property
    def header(self) -> str:
        """The line in a TOML file that begins the table."""
        table = self.key.replace("[]", "")
        return f"[[{table}]]" if self.key.endswith("[]") else f"[{table}]"


@dataclass(frozen=True)
class Setting:
    """One key. `default` is TOML, "" if it is required, and `unset` if it is optional."""

    key: str
    type: str
    default: str
    unit: str
    about: str


@cache
def sections() -> tuple[Section, ...]:
    """All sections in the order of the configuration file, each with its own keys."""
    return tuple(_sections(Config, "", parse_config({}, "the defaults")))


def settings() -> dict[str, Setting]:
    """All keys by their dotted names."""
    return {setting.key: setting for section in sections() for setting in section.settings}


def defaults_toml() -> str:
    """A configuration file with all defaults. Optional keys, optional sections and arrays of tables are comments."""
    tables = []
    for section in sections():
        mark = "# " if section.optional or "[]" in section.key else ""
        lines = [mark + section.header]
        for setting in section.settings:
            unset = "" if setting.default not in ("", "unset") else "# "
            lines.append(f"{mark or unset}{setting.key.rpartition('.')[2]} = {setting.default or 'required'}")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def reference() -> str:
    """`docs/configuration.md`: a table for each section. `python -m pipelines.config_reference` prints it."""
    parts = [_HEAD]
    for section in sections():
        parts.append(f"## `{section.header}`")
        if section.about:
            parts.append(section.about)
        if section.settings:
            rows = ["| key | type | default | unit | meaning |", "| --- | --- | --- | --- | --- |"]
            for each in section.settings:
                cells = (each.key.rpartition(".")[2], each.type, each.default or "required", each.unit, each.about)
                name, kind, default, unit, about = (cell.replace("|", "\\|") for cell in cells)
                rows.append(f"| `{name}` | {kind} | `{default}` | {unit} | {about} |")
            parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a configuration file, with the meaning of each key, for editors (`#:schema FILE`)."""
    schema = adapter(Config).json_schema()
    schema |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Laminar configuration"}
    for kind in (Config, *_classes(Config)):
        described = _descriptions(kind)
        target = schema if kind is Config else schema["$defs"][kind.__name__]
        target["additionalProperties"] = False
        for name, entry in target.get("properties", {}).items():
            entry |= {"description": described.get(name) or ""}
    return schema


def _sections(kind: Any, key: str, value: Any, optional: bool = False) -> Iterator[Section]:
    own, below = [], []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if name not in {field.name for field in dataclasses.fields(kind)}:
            continue
        dotted, inner = f"{key}.{name}".lstrip("."), _table_of(hint)
        current = getattr(value, name, dataclasses.MISSING)
        if inner is None:
            own.append(_setting(kind, name, dotted, hint, current))
        elif get_origin(hint) in (tuple, list):
            below.append((inner, f"{dotted}[]", dataclasses.MISSING))
        else:
            below.append((inner, dotted, current))
    if key:
        about = _paragraph((inspect.getdoc(kind) or "").partition("Raises ")[0])
        yield Section(key, about, tuple(own), optional)
    for inner, dotted, current in below:
        yield from _sections(inner, dotted, current, optional or current is None)


def _setting(kind: Any, name: str, key: str, hint: Any, current: Any) -> Setting:
    field = next(field for field in dataclasses.fields(kind) if field.name == name)
    if current is dataclasses.MISSING or field.default is None:  # unset, also where other keys decide it
        current = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    default = "" if current is dataclasses.MISSING else "unset" if current is None else _toml(current)
    text = _type_text(hint)
    return Setting(key, text, default, _unit(key, text), _paragraph(_descriptions(kind).get(name) or ""))


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _type_text(hint: Any) -> str:
    arguments = get_args(hint)
    if get_origin(hint) is Annotated:
        return f"{_type_text(arguments[0])}, {' and '.join(map(requirement, bounds_of(hint)))}"
    if get_origin(hint) is Literal:
        return " | ".join(f'"{choice}"' for choice in arguments)
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_type_text(part) for part in arguments if part is not NoneType)
    if get_origin(hint) in (tuple, list):
        return f"list of {_type_text(arguments[0])}"
    if get_origin(hint) is not None and issubclass(get_origin(hint), Mapping):
        return f"table of {_type_text(arguments[1])}" if bounds_of(arguments[1]) else "table"
    return _SIMPLE.get(hint, getattr(hint, "__name__", str(hint)))


def _unit(key: str, kind: str) -> str:
    if key in KEY_UNITS:
        return KEY_UNITS[key]
    if not re.match(r"(list of |table of )?(integer|number)", kind):
        return ""
    ends = sorted((end for end in UNITS if key.endswith(end)), key=len)
    return UNITS[ends[-1]] if ends else ""


def _table_of(hint: Any) -> Any:
    """The configuration class in `hint`, which may be optional or a list; None if there is none."""
    parts = (part for part in (hint, *get_args(hint)) if isinstance(part, type))
    return next(filter(dataclasses.is_dataclass, parts), None)


def _classes(kind: Any) -> Iterator[Any]:
    for hint in get_type_hints(kind).values():
        if (inner := _table_of(hint)) is not None:
            yield inner
            yield from _classes(inner)


@cache
def _descriptions(kind: Any) -> dict[str, str]:
    """The docstring below each field of a configuration class, by the field's name."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if dataclasses.is_dataclass(each):
            for node, after in itertools.pairwise(_class_body(each)):
                text = ast.get_docstring(ast.Module([after], []), clean=False)
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and text is not None:
                    found[node.target.id] = text
    return found


def _class_body(kind: Any) -> list[ast.stmt]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    return definition.body


def _paragraph(text: str) -> str:
    return re.sub(r"\s+", " ", text.split("\n\n")[0]).strip()


if __name__ == "__main__":
    print(reference(), end="")
