"""The sizes of the random Qwen2 models that benchmarks make."""

from __future__ import annotations

from typing import Any


def qwen2(hidden: int, mlp: int, layers: int, heads: int, vocabulary: int, kv: int = 2, context: int = 4096) -> Any:
    """The arguments of a Qwen2Config with `kv` heads of keys and values."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": context,
        "tie_word_embeddings": True,
    }


NO_END: Any = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
"""The arguments of a config whose model has no special tokens."""
