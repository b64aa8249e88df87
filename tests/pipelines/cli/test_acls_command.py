"""`laminar acls`: which brokers it connects to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from infra.kafka import acls
from infra.kafka.properties import ClientProperties


@pytest.mark.parametrize(
    ("file", "words", "address"),
    [
        ("", ("-b", "one:9093"), "one:9093"),
        ("bootstrap.servers=two:9094", ("-b", "one:9093"), "one:9093"),
        ("bootstrap.servers=two:9094", (), "two:9094"),
        (None, (), "localhost:9092"),
        (None, ("-b", "one:9093"), "one:9093"),
    ],
)
def test_acls_are_created_at_the_brokers_that_are_named(
    file: str | None,
    words: tuple[str, ...],
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., tuple[int, str, str]],
) -> None:
    clients: list[ClientProperties] = []
    monkeypatch.setattr(acls, "create_acls", lambda client, lists: clients.append(client) or len(lists))
    properties = tmp_path / "admin.properties"
    properties.write_text(f"security.protocol=SSL\n{file}\n")
    options = ("-F", str(properties)) if file is not None else ()
    code, text, _ = command("acls", "first", "--apply", *words, *options)
    assert (code, "created" in text, [each.bootstrap_servers for each in clients]) == (0, True, [address])
