"""Keys of episodes."""

from __future__ import annotations

from operators.io.episode_keys import EpisodeKeys


def test_key_is_valid_for_its_episode_and_run_alone() -> None:
    keys = EpisodeKeys("run", "a secret of a run")
    key = keys.key_of("p12.3")
    assert keys.holder_of(key) == keys.holder_of(f"{key}~1") == "p12.3"
    assert keys.holder_of(key.replace("p12.3", "p12.4")) is None
    assert EpisodeKeys("other", "a secret of a run").holder_of(key) is None
    assert EpisodeKeys("run", "another secret....").holder_of(key) is None
