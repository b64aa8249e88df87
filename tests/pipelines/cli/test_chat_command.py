"""`laminar chat` says what it waits for until the first text of an answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from pipelines.cli import chat
from pipelines.cli.main import main
from pipelines.run.gateway_access import GatewayAccess


def test_chat_shows_what_it_waits_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    @contextmanager
    def post(access: GatewayAccess, path: str, body: Mapping[str, Any]) -> Iterator[list[bytes]]:
        deadline = time.monotonic() + 30
        while not (line := capsys.readouterr().err):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        seen.append(line)
        yield [b'data: {"choices": [{"delta": {"content": "46"}}]}\n', b"data: [DONE]\n"]

    monkeypatch.setattr(GatewayAccess, "post", post)
    monkeypatch.setattr(chat, "WAIT_S", 0.02)
    with pytest.raises(SystemExit) as ended:
        main(["chat", "12+34=", "--url", "http://127.0.0.1:1/v1", "--key", "k", "--version", "1.20"])
    assert ended.value.code == 0
    assert seen[0].startswith(
        "waiting for the gateway to answer under version 1.20: the first question starts a process"
    )
    assert capsys.readouterr().out == "46\n"
