"""`laminar config`: explain the configuration keys, and compare two configurations."""

from __future__ import annotations

import json as json_text
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.cli.option_sets import Commands
from pipelines.cli.options import JsonOption
from pipelines.inspect.run_folders import RUNS, config_file, laminar_command
from pipelines.present.output import Report

if TYPE_CHECKING:
    from pipelines.config_difference import Difference

app = Commands()


@app.command()
def config(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY | FIRST SECOND]", help="A key or part of one; with --diff two configurations."),
    ] = None,
    *,
    explain: Annotated[bool, typer.Option("--explain", help="Explain keys; this is the default mode.")] = False,
    defaults: Annotated[bool, typer.Option("--defaults", help="Print every key with its default, as TOML.")] = False,
    diff: Annotated[
        bool,
        typer.Option(
            "--diff", help="Print the keys that differ between two files or runs. Exits with 1 if any differ."
        ),
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of configuration files, for editors.")
    ] = False,
    json: JsonOption = False,
) -> Report:
    """Explain configuration keys: type, default, unit and meaning; or compare two configurations.

    \b
    Examples:
      laminar config --explain placement.repack_s
      laminar config --explain staleness
      laminar config --defaults > everything.toml
      laminar config --diff examples/chain_sum.toml examples/gcd.toml
      laminar config --schema > laminar.schema.json     # then `#:schema laminar.schema.json` as a file's first line
    """
    modes: Mapping[str, tuple[bool, int, Callable[..., Report]]] = {
        "--explain": (explain, 1, _explain),
        "--defaults": (defaults, 0, _defaults),
        "--diff": (diff, 2, _diff),
        "--schema": (schema, 0, _schema),
    }
    chosen = [name for name, (is_set, _, _) in modes.items() if is_set] or ["--explain"]
    if len(chosen) > 1:
        raise typer.BadParameter(f"{' and '.join(chosen)} exclude each other")
    _, max_names, run_mode = modes[chosen[0]]
    given = names or []
    if len(given) > max_names or (chosen[0] == "--diff" and len(given) < 2):
        raise typer.BadParameter(f"{chosen[0]} takes {max_names} name(s), not {len(given)}")
    return run_mode(given, json)


def _explain(names: Sequence[str], json: bool) -> Report:
    from difflib import get_close_matches

    from pipelines.config import ConfigError
    from pipelines.config_reference import sections, settings

    key, all_settings = (names[0] if names else ""), settings()
    section = next((each for each in sections() if each.key.removesuffix("[]") == key.removesuffix("[]")), None)
    within = all_settings.values() if section is None else section.settings
    found = [vars(each) for each in within if key in each.key]
    if not found:
        similar = get_close_matches(key, all_settings, n=3)
        hint = (
            f"; similar: {', '.join(similar)}"
            if similar
            else f": `{laminar_command()} config --explain` lists all keys"
        )
        raise ConfigError(f"no configuration key contains {key!r}{hint}")
    lines = [_setting_text(each) for each in found]
    if section is not None:
        inner = [each.key for each in sections() if each.key.startswith(f"{section.key}.")]
        lines += [f"Sections within: {', '.join(inner)}"] if inner else []
    return Report(found, lambda: "\n".join(lines), as_json=json)


def _defaults(_names: Sequence[str], json: bool) -> Report:
    from pipelines.config_reference import defaults_toml, settings

    return Report({name: each.default for name, each in settings().items()}, defaults_toml, as_json=json)


def _diff(names: Sequence[str], json: bool) -> Report:
    from pipelines.config_difference import difference_of_files

    found = difference_of_files(*map(_config_file, names))

    def text() -> str:
        lines = difference_lines(found) or ["The settings are equal."]
        if found.own:
            lines.append(f"(of each run, not compared: {', '.join(found.own)})")
        return "\n".join(lines)

    data = {key: list(values) for key, values in found.keys.items()}
    return Report(data, text, as_json=json, exit_code=1 if data else 0)


def difference_lines(found: Difference) -> list[str]:
    """Return each setting that differs with both values."""
    return [f"{key}: {_value_text(one)} -> {_value_text(other)}" for key, (one, other) in found.keys.items()]


def _schema(_names: Sequence[str], json: bool) -> Report:
    from pipelines.config_reference import json_schema

    data = json_schema()
    return Report(data, lambda: json_text.dumps(data, indent=1), as_json=json)


def _config_file(name: str) -> Path:
    """Return the configuration file of `name`: a file, a run's folder or a run's name."""
    path = Path(name)
    return path if path.is_file() else config_file(path) or config_file(RUNS / name) or path


def _value_text(value: Any) -> str:
    return "unset" if value is None else json_text.dumps(value)


def _setting_text(setting: Mapping[str, str]) -> str:
    kind, comma, bounds = setting["type"].partition(", ")
    unit = f" in {setting['unit']}" if setting["unit"] else ""
    default = setting["default"] or "none, required"
    return f"{setting['key']}: {kind}{unit}{comma}{bounds}, default {default}\n    {setting['about']}"
