"""What a model's config.json tells without model code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra.models.sizes import unsupported_features


@pytest.mark.parametrize(
    ("config", "features"),
    [
        ({}, None),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 4096}, None),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers of sliding_attention"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window = 4096"),
        ({"model_type": "qwen2", "sliding_window": 4096}, None),  # whose default is not to use it
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, None),
        ({"logits_scaling": None, "logit_scale": None}, None),
        ({"sliding_window": None}, None),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        ({"attn_logit_softcapping": 50.0, "final_logit_softcapping": None}, "attn_logit_softcapping = 50.0"),
        ({"logits_scaling": 8.0}, "logits_scaling = 8.0"),
        ({"model_type": "gemma3", "text_config": {"hidden_size": 8}}, "a text_config: it is not of text alone"),
        ({"logits_scaling": 1.0, "logit_scale": 0.0625}, "logit_scale = 0.0625"),
    ],
)
def test_config_names_what_cannot_be_trained(tmp_path: Path, config: dict[str, Any], features: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert unsupported_features(tmp_path) == features
