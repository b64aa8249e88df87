"""Readable YAML: keys in the given order, multi-line text in blocks, no aliases."""

from __future__ import annotations

from typing import Any

import yaml


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Write repeated values in full."""
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Plain.add_representer(str, _text)


def as_yaml(value: Any) -> str:
    """Format `value` as a YAML document."""
    return yaml.dump(value, Dumper=_Plain, sort_keys=False, width=120)
