"""What a start of each role reads of the log, and why that does not grow with the length of the run.

A test builds the graph of every role and compares what its sources read with this table, so no new input can be left
out. Where a start begins is decided by `Reading.start`; what is read below the newest records, by the step's low-water
mark.
"""

from __future__ import annotations

from collections.abc import Mapping

LEDGER = "ledger"
"""Marks a topic that a role reads back because it wrote it."""

_NEXT = "from the committed offset: nothing is read twice"
_NOTE = "from the committed offset; what earlier manifests said is in the commit's note"
_NEW_TO_THE_RUN = "; one that is new to the run reads the newest manifests alone"
_CHAIN = "all: compacted, one key; the newest record and what the cleaner has not come to, at most two segments"
_END = "nothing: from the end on"
_ADMITTED = "as many trajectories as placement admits (`placement.admitted`)"

READS: Mapping[str, Mapping[tuple[str, str], str]] = {
    "prompts": {("curriculum", ""): _NEXT},
    "placement": {
        (
            "prompts",
            "",
        ): "from the oldest prompt that is not wholly dispatched: at most `placement.prompt_lead` prompts",
        ("eval-prompts", ""): "from the oldest question not wholly dispatched: at most two rounds",
        ("progress", ""): "from the oldest lease under way: " + _ADMITTED,
        ("trajectories", ""): "from the oldest that is not settled: " + _ADMITTED,
        ("settled", ""): "from the oldest group not wholly settled, or batch that no version covers: " + _ADMITTED,
        ("relay", ""): _NOTE,
        ("relay-chain", ""): _CHAIN,
        ("replicas", ""): _END,
        ("inbox", LEDGER): "from the oldest assignment under way: " + _ADMITTED,
    },
    "rollout": {("inbox", ""): _END, ("relay", ""): _NOTE + _NEW_TO_THE_RUN},
    "score": {
        ("trajectories", ""): "from the oldest that is not scored: one poll, and what has come since",
        ("experiences", LEDGER): "from the oldest group that is not whole: " + _ADMITTED,
    },
    "experience": {
        ("experiences", ""): "from the oldest member that is held: " + _ADMITTED,
        ("relay", ""): _NOTE,
        ("curriculum", ""): _NEXT + ", the level is in the commit's note",
        ("batch-assembly", ""): "from the oldest group that is set aside: a batch a shard",
        ("settled", LEDGER): "from the oldest group that is not wholly settled: " + _ADMITTED,
    },
    "trainer": {
        ("batches", ""): "from the newest checkpoint: `trainer.checkpoint_every` batches",
        ("relay", ""): "from the manifest of the oldest of `trainer.checkpoints_kept` checkpoints",
        ("relay-chain", ""): _CHAIN,
    },
    "evaluation": {
        ("experiences", ""): "from the oldest answer of a round under way: two rounds",
        ("relay", ""): _NOTE,
    },
    "relay": {
        ("relay", ""): "from the oldest manifest whose version it keeps: `relay.keep_versions`" + _NEW_TO_THE_RUN,
        ("relay-chain", ""): _CHAIN,
        ("replicas", ""): _END,
    },
}
"""By role: (noun, "" or LEDGER) of each topic that its starts read, and what bounds that."""

OBSERVERS: Mapping[str, str] = {
    "metrics": "from where the observer before stood (a line of metrics.jsonl), or the newest 20,000 offsets",
    "relay": "likewise, or the newest 1,000 offsets",
    "replicas": _END,
}
"""By noun: what `laminar run`, `watch` and `metrics serve` read."""
