"""Text after other tokens, with the kinds of tokenizers that models have: some put a space before every text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizer_kinds import KINDS, tokenizer

from infra.models.chat import continuation, message_frame
from infra.models.conversations import ConversationFormat
from operators.rollout.config import RolloutConfig
from operators.rollout.model_backend import ModelBackend
from operators.rollout.stop_strings import StopMatcher

TEMPLATE_START = "<s>[INST] Guess [/INST]"
TEXTS = (
    *("higher\n", "\n", "\n\nhigher", " lower", "  x", "7", "10 11", "<result>84</result>", ".", "0", "a", " ", "\t"),
    *("é ü 漢字 🙂", "a</s>b", "[INST]"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_continuation_decodes_to_its_text_after_any_tokens(kind: str) -> None:
    made = tokenizer(kind)
    for context in ("<s>", "go on", "go on\n", "12", "é", " "):
        before = made.encode(context, add_special_tokens=False)
        for text in TEXTS:
            after = continuation(made, text, split_special_tokens=True)
            assert made.decode([*before, *after]) == made.decode(before) + text
            assert not set(after) & set(made.all_special_ids), "a spelling became a special token"


@pytest.mark.parametrize("kind", ["byte_level", "never"])
def test_continuation_is_the_plain_encoding_without_prefix(kind: str) -> None:
    made = tokenizer(kind)
    for text in ("", *TEXTS):
        assert continuation(made, text) == made.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
def test_observations_of_a_model_folder_have_their_text(kind: str, tmp_path: Path) -> None:
    tokenizer(kind).save_pretrained(tmp_path)
    backend = ModelBackend(RolloutConfig(), tmp_path, tmp_path / "store")
    turn = tokenizer(kind).encode("7\n", add_special_tokens=False)
    assert backend.decode([*turn, *backend.encode("higher\n")]) == backend.decode(turn) + "higher\n"


@pytest.mark.parametrize("kind", ["byte_level", "first", "never"])
def test_message_frames_equal_the_conversation_of_the_template(kind: str) -> None:
    made = tokenizer(kind)
    prompt = made.encode(TEMPLATE_START, add_special_tokens=False)
    turn = [*continuation(made, "7"), made.eos_token_id]
    tokens = [*prompt, *turn, *message_frame(made, "user").around(continuation(made, "higher\n"), ended=True)]
    assert made.decode(tokens) == TEMPLATE_START + "7</s>[INST] higher\n [/INST]"


@pytest.mark.parametrize("kind", KINDS)
def test_plain_conversations_continue_with_the_text(kind: str) -> None:
    made = tokenizer(kind)
    messages = [
        {"role": role, "content": text} for role, text in (("user", "Guess"), ("assistant", "7"), ("user", "up"))
    ]
    recorded = made.encode("Guess7", add_special_tokens=False)
    following = ConversationFormat(made, plain=True).next_tokens(messages, (), 2, recorded[-1])
    assert made.decode([*recorded, *following]) == made.decode(recorded) + "up"


@pytest.mark.parametrize("kind", KINDS)
def test_stop_matcher_finds_a_string_that_ends_with_a_space(kind: str) -> None:
    made = tokenizer(kind)
    tokens = continuation(made, "go: ")
    matcher = StopMatcher((": ",), lambda token_ids: made.decode(token_ids, skip_special_tokens=True))
    assert matcher.may_complete(np.array(tokens[-1:]))
    assert matcher.end(np.array(tokens)) == len(tokens)
