"""Small tokenizers of the kinds that models have: some put a space before every text."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

CORPUS = ["higher lower\n higher, lower. <result>84</result> user: go on\n\n", "a b c 0 1 2 3 10 11"] * 3
SPECIAL = "<s>", "</s>", "[INST]", "[/INST]"
TEMPLATE = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
KINDS = "byte_level", "byte_level_prefix", "never", "first", "always", "always_split", "normalizer"


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerBase:
    """A tokenizer of `kind` with the special tokens SPECIAL; all but the byte-level ones have byte fallback."""
    byte_level = kind.startswith("byte_level")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=kind == "byte_level_prefix")
        if byte_level
        else pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else []
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    made.decoder = decoders.ByteLevel()
    if not byte_level:
        trained = json.loads(made.to_str())["model"]
        tokens = dict.fromkeys(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *trained["vocab"]])
        vocabulary = {token: number for number, token in enumerate(tokens)}
        merges = [(first, second) for first, second in trained["merges"]]
        made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
        steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
        made.decoder = decoders.Sequence(list(steps))
        if kind == "normalizer":  # as Mistral's and Llama 2's
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            scheme, _, split = kind.partition("_")
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=bool(split))
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = TEMPLATE
    return wrapped
