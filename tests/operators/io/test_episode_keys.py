"""Keys of episodes, and the secret that they follow from."""

from __future__ import annotations

from pathlib import Path

import pytest

from operators.io.episode_keys import EpisodeKeys, read_or_create_secret


def test_key_is_valid_for_its_episode_and_run_alone() -> None:
    keys = EpisodeKeys("run", "a secret of a run")
    key = keys.key_of("p12.3")
    assert keys.holder_of(key) == keys.holder_of(f"{key}~1") == "p12.3"
    assert keys.holder_of(key.replace("p12.3", "p12.4")) is None
    assert EpisodeKeys("other", "a secret of a run").holder_of(key) is None
    assert EpisodeKeys("run", "another secret....").holder_of(key) is None


def test_secret_is_created_once_and_private(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    secret = read_or_create_secret(file, create=True)
    assert read_or_create_secret(file, create=True) == secret
    assert file.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == [file]
    file.write_text("short\n")
    with pytest.raises(ValueError, match="must have at least 16 characters"):
        read_or_create_secret(file, create=False)
