"""The configuration of the demonstration model. It does not import torch, so that a command line loads it quickly."""

from __future__ import annotations

from dataclasses import dataclass

from infra.setting_types import CheckedSettings, Positive, PositiveInt

# The phrases that each demonstration task repeats in every question: one token each (see infra/models/demo.py).
PHRASES: dict[str, tuple[str, ...]] = {
    "chain_sum": ("State the final answer to the following arithmetic problem: ", " + ", " - ", " ="),
    "gcd": (
        "Find the Greatest Common Divisor (GCD) of these numbers: ",
        ", ",
        ". Give only the GCD as your final answer.",
    ),
    "spell_backward": ("Spell this word backward (example: sun -> nus): ",),
}


@dataclass(frozen=True, slots=True)
class DemoModelConfig(CheckedSettings):
    """A Qwen2 model small enough to train on two CPU cores, and its tokenizer.

    `task` names the reasoning-gym task whose repeated phrases become single tokens; a task that is not in `PHRASES`
    is encoded byte by byte. Raises ValueError naming the invalid field.
    """

    task: str = "chain_sum"
    """The task whose characters are in the tokenizer."""
    hidden_size: PositiveInt = 128
    """Width of the hidden states."""
    layers: PositiveInt = 3
    """Transformer layers."""
    heads: PositiveInt = 4
    """Attention heads."""
    kv_heads: PositiveInt = 2
    """Key and value heads (grouped-query attention)."""
    mlp_size: PositiveInt = 384
    """Width of the MLP."""
    phrases: tuple[str, ...] = ()  # additional phrases that are single tokens
    """Texts that are one token each."""
    max_positions: PositiveInt = 512  # tokens of prompt and response together
    """Longest context in tokens."""
    rope_theta: Positive = 10_000.0
    """Base of the rotary position embedding."""
    tied_embeddings: bool = True
    """Whether output weights are the embedding."""
    seed: int = 0  # of the initial weights
    """Seed of the random initial weights."""

    def _check(self) -> None:
        if not all(self.phrases):
            raise ValueError("phrases must not be empty")
        if self.hidden_size % (2 * self.heads):
            raise ValueError(f"hidden_size {self.hidden_size} must be an even multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} must divide heads {self.heads}")
