"""How many tokens a model attends over."""

from __future__ import annotations

from transformers import PreTrainedModel


def check_context(model: PreTrainedModel, wanted: int | None) -> int:
    """The context to run `model` with: `wanted`, or the model's maximum position.

    Raises ValueError if the model has fewer positions, or if a layer attends over fewer tokens: KV slots keep every
    token.
    """
    name, config = type(model).__name__, model.config
    positions: int | None = getattr(config, "max_position_embeddings", None)
    context = positions if wanted is None else wanted
    if context is None:
        raise ValueError(f"{name} has no max_position_embeddings: set the context")
    if positions is not None and context > positions:
        raise ValueError(f"a context of {context} tokens exceeds the {positions} positions of {name}")
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    if not kinds <= {"full_attention", "sliding_attention"}:
        raise ValueError(f"{name} has layers of types {sorted(kinds)}: KV slots support only attention")
    windows = [getattr(config, key, None) for key in ("sliding_window", "window_size", "attention_window")]
    window = next((window for window in windows if isinstance(window, int)), None)
    if "sliding_attention" in kinds and window is not None and window < context:
        raise ValueError(f"{name} attends over {window} tokens: a context of {context} is too long for KV slots")
    return context
