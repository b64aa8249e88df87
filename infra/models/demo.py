"""A demonstration model built in code: nothing is downloaded, and its weights are a function of a seed.

The tokenizer encodes bytes, so numbers are read digit by digit and any text can be encoded. Phrases that a task repeats
in every question are single tokens, so a prompt has about ten tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import AddedToken, pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from infra.models.demo_config import PHRASES, DemoModelConfig

PAD, EOS = "<|pad|>", "<|endoftext|>"


def build_demo_tokenizer(phrases: Sequence[str], max_length: int = 512) -> Qwen2Tokenizer:
    """A byte-pair tokenizer without merges in which each of `phrases` is one token; `max_length` is in tokens.

    Ids are a function of `phrases` alone: pad 0, end of sequence 1, the 256 bytes, then the phrases. Nothing is added
    before or after a text; decoding returns the text. The class is Qwen2's own because `AutoTokenizer` creates it for
    every tokenizer beside a Qwen2 model, whatever class was saved, and keeps only vocabulary, merges and added
    tokens; phrases are therefore added tokens, and not merges across word boundaries.
    """
    vocabulary = [PAD, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(vocabulary)},
        merges=[],
        unk_token=EOS,  # never used: every byte is known
        eos_token=EOS,
        pad_token=PAD,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
    tokenizer.add_tokens([AddedToken(phrase, normalized=False, special=False) for phrase in phrases])
    return tokenizer


def build_demo_model(config: DemoModelConfig) -> tuple[Qwen2ForCausalLM, Qwen2Tokenizer]:
    """A freshly initialised float32 Qwen2 model, in evaluation mode, and its tokenizer.

    A function of `config.seed`; torch's global random state is not changed.
    """
    phrases = *PHRASES.get(config.task, ()), *config.phrases
    tokenizer = build_demo_tokenizer(phrases, config.max_positions)
    qwen2 = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.mlp_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied_embeddings,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = Qwen2ForCausalLM(qwen2)
    return model.eval(), tokenizer
