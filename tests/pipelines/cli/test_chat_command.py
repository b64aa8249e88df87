"""`laminar chat` says what it waits for until the first text of an answer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infra.files import create_secret
from operators.io.episode_keys import ADDRESS_FILE, SECRET_FILE
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


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("https://0.0.0.0:8443/v1", "https://127.0.0.1:8443/v1"),
        ("https://[::]:8443/v1", "https://[::1]:8443/v1"),
        ("https://gpu1.example:8443/v1", "https://gpu1.example:8443/v1"),
    ],
)
def test_chat_connects_to_a_gateway_at_all_addresses(
    written: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("[run]\nname = 'first'\n[gateway]\n")
    (folder / ADDRESS_FILE).write_text(json.dumps({"url": written, "port": 8443}))
    create_secret(folder / SECRET_FILE)
    assert chat._access("first", None, None).url == url
