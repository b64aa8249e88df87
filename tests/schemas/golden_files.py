"""Golden files of the record classes: fields as text and an encoded sample, by schema version.

`python tests/schemas/golden_files.py` writes the missing files; it never changes an existing one.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

from record_samples import SAMPLES

from schemas.codec import RECORD_TYPES, RecordType, encode
from schemas.shape import fields_of

FOLDER = Path(__file__).parent / "golden"


def path_of(entry: RecordType) -> Path:
    """The path of the golden file of `entry`."""
    return FOLDER / f"{entry.kind.__name__}-{entry.version}.json"


def field_lines(kind: type, prefix: str = "") -> Iterator[str]:
    """The fields of `kind`, one per line, nested ones with dotted names: name, kind, type, nullable, choices."""
    for field in fields_of(kind):
        optional = " or null" if field.optional else ""
        choices = f" {sorted(field.choices)}" if field.choices else ""
        named = getattr(field.of, "__name__", str(field.of))
        yield f"{prefix}{field.name}: {field.kind} of {named}{optional}{choices}"
        if hasattr(field.of, "__dataclass_fields__"):
            yield from field_lines(field.of, f"{prefix}{field.name}.")


def write_missing() -> list[Path]:
    """Write the missing golden files, and return their paths."""
    written = []
    for entry in RECORD_TYPES:
        path = path_of(entry)
        if not path.exists():
            value, headers = encode(SAMPLES[entry.kind])
            content = {
                "schema": entry.schema,
                "encoding": entry.encoding,
                "fields": list(field_lines(entry.kind)),
                "headers": {name: text.decode() for name, text in headers},
                "value": base64.b64encode(value).decode(),
            }
            path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
            written.append(path)
    return written


if __name__ == "__main__":
    print("\n".join(map(str, write_missing())) or "no file is missing")
