"""Lossless speculation: drafts of the next tokens from recent texts, verified in one pass.

The draw of a token is a function of trajectory and position, so a draft is accepted exactly as far as it equals what is
drawn anyway: tokens and logprobs are those without speculation. A draft continues the text whose last tokens are those
of the trajectory: a text of its group, of an earlier epoch of its prompt, or of another prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from operators.rollout.draft_index import LONGEST, DraftIndex, Match, Text
from operators.rollout.draft_lengths import LENGTHS, MOST_ROWS, ForwardCost, draft_length
from operators.rollout.engine import Request
from operators.rollout.token_rows import TokenRows

NO_DRAFT = -2
"""The token behind the end of a row's draft."""
PIECE = 16
"""New tokens of a running row after which they become drafts for others."""
OVERLAP = 8
"""Tokens before a text, or a piece of one, that are indexed with it, so that its first tokens can be found."""
HISTORY = 1 << 20
"""Tokens of texts that are kept."""
_PRIOR = np.array([3.0, 4.0])
"""Accepted and verified tokens with which every estimate of acceptance begins."""
_KEPT = 0.995
"""The share of the observed counts that is kept from a step to the next."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What speculation has done so far: rows of the steps with few rows, those for which a text was found, drafts that
    were verified, their tokens, the accepted ones, and drafts with another token than the one drawn."""

    rows: int = 0
    found: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0

    def since(self, before: Counts) -> Counts:
        """The counts after `before`."""
        return Counts(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))

    @property
    def draft_share(self) -> float:
        """The share of rows for which a text was found; 0 without rows."""
        return self.found / self.rows if self.rows else 0.0

    @property
    def acceptance(self) -> float:
        """The probability that a draft token is accepted after those before it were; 0 without drafts."""
        verified = self.accepted + self.rejected
        return self.accepted / verified if verified else 0.0


class Acceptance:
    """The share of verified draft tokens that were accepted, by the length of the match and whether it had the same
    prompt. Older observations fade, towards three of four."""

    def __init__(self) -> None:
        self._counts = np.tile(_PRIOR, (2, LONGEST.bit_length() + 1, 1))

    def of(self, match: Match) -> float:
        """The expected share for a draft after `match`."""
        accepted, verified = self._counts[_class(match)]
        return float(accepted / verified)

    def fade(self) -> None:
        """Forget a part of the observations."""
        self._counts = _PRIOR + _KEPT * (self._counts - _PRIOR)

    def observe(self, match: Match, accepted: int, drafted: int) -> None:
        """Record that the first `accepted` of `drafted` tokens were accepted. Those behind the first other token do not
        count."""
        self._counts[_class(match)] += (accepted, min(accepted + 1, drafted))


def _class(match: Match) -> tuple[int, int]:
    return int(match.same_prompt), min(match.tokens, LONGEST).bit_length()


@dataclass(slots=True)
class _DraftedRow:
    """A running trajectory with `generated` tokens, of which `indexed` are drafts for others; `match` is where its last
    tokens occur."""

    prompt: int
    generated: int
    indexed: int = 0
    match: Match | None = None


class Speculator:
    """Drafts for the rows of an engine, and what it learns from their verification."""

    def __init__(self, cost: ForwardCost) -> None:
        self._cost, self._index, self._acceptance = cost, DraftIndex(HISTORY), Acceptance()
        self._most_pending = HISTORY // 4
        self._pending: list[Text] = []
        self._pending_tokens = 0
        self._rows: dict[str, _DraftedRow] = {}
        self._plain_next = False
        self.counts = Counts()

    def propose(self, rows: TokenRows, kv_free: int) -> np.ndarray | None:
        """The last token of each row and its draft, int64[count, 1 + draft], padded with NO_DRAFT; None: a plain step.

        The rows may store `kv_free` more tokens of KV.
        """
        count, plain, self._plain_next = rows.count, self._plain_next, False
        if count > MOST_ROWS or plain:
            return None
        self._flush()
        self._acceptance.fade()
        matches = [each.match for each in self._follow(rows)]
        room = np.minimum(rows.limit[:count] - rows.generated[:count] - 1, LENGTHS[-1])
        drafts = [
            [] if match is None else self._index.continuation(match, int(most))
            for match, most in zip(matches, room, strict=True)
        ]
        acceptance = np.array([0.0 if match is None else self._acceptance.of(match) for match in matches])
        lengths = np.array([len(draft) for draft in drafts])
        self.counts = replace(
            self.counts, rows=self.counts.rows + count, found=self.counts.found + int((lengths > 0).sum())
        )
        length = draft_length(lengths, acceptance, self._cost)
        if not length or count * (length + 1) > kv_free:
            return None
        found = np.full((count, length + 1), NO_DRAFT, np.int64)
        found[:, 0] = rows.last_token[:count]
        for row, draft in enumerate(drafts):
            found[row, 1 : 1 + len(draft)] = draft[:length]
        return found

    def observe(self, rows: TokenRows, draft: np.ndarray, agreed: np.ndarray, broken: bool) -> None:
        """Record that of each row's `draft` the first `agreed` (int64[count]) tokens were accepted.

        After a `broken` verification, with logits that are not finite, the next step is plain.
        """
        self._plain_next = broken
        drafted = (draft[:, 1:] != NO_DRAFT).sum(1)
        before = self.counts
        self.counts = replace(
            before,
            drafts=before.drafts + int((drafted > 0).sum()),
            drafted=before.drafted + int(drafted.sum()),
            accepted=before.accepted + int(agreed.sum()),
            rejected=before.rejected + int((agreed < drafted).sum()),
        )
        for row in np.flatnonzero(drafted).tolist():
            match = self._rows[rows.requests[row].trajectory_id].match
            assert match is not None
            self._acceptance.observe(match, int(agreed[row]), int(drafted[row]))

    def finish(self, request: Request, token_ids: np.ndarray) -> None:
        """Keep the response `token_ids` to `request` for later drafts."""
        tokens = np.concatenate([request.prompt[-OVERLAP:], token_ids])
        self._pending.append(Text(_prompt_key(request), tokens))
        self._pending_tokens += len(tokens) + 1
        if self._pending_tokens > self._most_pending:
            self._flush()

    def _flush(self) -> None:
        self._index.add(self._pending)
        self._pending, self._pending_tokens = [], 0

    def _follow(self, rows: TokenRows) -> list[_DraftedRow]:
        """The state of each row, brought up to its present tokens."""
        known, self._rows = self._rows, {}
        pieces: list[Text] = []
        for row, request in enumerate(rows.requests):
            generated = int(rows.generated[row])
            each = known.get(request.trajectory_id)
            if each is None or each.generated > generated:
                each = _DraftedRow(_prompt_key(request), generated)
            gained = rows.recent(row, generated - each.generated).tolist()
            match = None if each.match is None else self._index.follow(each.match, gained)
            each.match = match or self._index.find(each.prompt, rows.recent(row, LONGEST).tolist())
            each.generated = generated
            if generated - each.indexed >= PIECE:
                pieces.append(Text(each.prompt, rows.recent(row, generated - each.indexed + OVERLAP)))
                each.indexed = generated
            self._rows[request.trajectory_id] = each
        self._index.add(pieces)
        return list(self._rows.values())


def _prompt_key(request: Request) -> int:
    return hash(request.prompt.tobytes())
