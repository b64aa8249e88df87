"""What each role reads from the log at a start, and why that does not grow with the length of the run.

A test builds the graph of every role and compares the inputs of its sources with this table, so every input is listed.
`TopicInput.start` decides where a first start begins; the step's low-water mark decides which older records a restart
reads again.
"""

from __future__ import annotations

from collections.abc import Mapping

LEDGER = "ledger"
"""Marks a topic that a role reads back because the role itself writes it."""

_NEXT = "from the committed offset: no record is read twice"
_NOTE = "from the committed offset; the commit's note holds the state from earlier manifests"
_NEWEST = "from the newest manifest; the commit's note holds the state from earlier ones"
_NEW_TO_THE_RUN = "; without a committed offset, the newest manifests only"
_CHAIN = "all: compacted, one key; the newest record and those not yet compacted, at most two segments"
_CONTROL = "all: compacted, one key; the newest record and those not yet compacted"
_END = "no old records: from the end"
_ADMITTED = "the trajectories of `placement.admitted_batches` batches"

READS: Mapping[str, Mapping[tuple[str, str], str]] = {
    "prompts": {("curriculum", ""): _NEXT},
    "placement": {
        ("prompts", ""): "from the oldest prompt that is not fully dispatched: at most `placement.prompt_lead` prompts",
        ("eval-prompts", ""): "from the oldest question that is not fully dispatched: at most two rounds",
        ("progress", ""): "from the oldest active lease: " + _ADMITTED,
        ("trajectories", ""): "from the oldest that is not settled: " + _ADMITTED,
        ("settled", ""): "from the oldest group not fully settled, or batch in no version: " + _ADMITTED,
        ("relay", ""): _NEWEST,
        ("relay-chain", ""): _CHAIN,
        ("control", ""): _CONTROL,
        ("replicas", ""): _END,
        ("inbox", LEDGER): "from the oldest active assignment: " + _ADMITTED,
    },
    "rollout": {("inbox", ""): _END, ("relay", ""): _NEWEST + _NEW_TO_THE_RUN},
    "gateway": {
        ("inbox", ""): "from the oldest record of an episode that has not finished: " + _ADMITTED,
        ("progress", ""): "from the oldest record of an episode that has not finished: " + _ADMITTED,
        ("trajectories", ""): "from the oldest of a group that has not finished: " + _ADMITTED,
    },
    "agents": {
        ("inbox", ""): "from the oldest assignment of an episode that has not finished: " + _ADMITTED,
        ("trajectories", ""): "from the oldest of a group that has not finished: " + _ADMITTED,
    },
    "score": {
        ("trajectories", ""): "from the oldest that is not scored: one poll, and newer records",
        ("experiences", LEDGER): "from the oldest incomplete group: " + _ADMITTED,
    },
    "experience": {
        ("experiences", ""): "from the oldest member in the buffer: " + _ADMITTED,
        ("relay", ""): _NOTE,
        ("control", ""): _CONTROL,
        ("curriculum", ""): _NEXT + ", the level is in the commit's note",
        ("batch-assembly", ""): "from the oldest proposed group: one batch per shard",
        ("settled", LEDGER): "from the oldest group that is not fully settled: " + _ADMITTED,
    },
    "trainer": {
        ("batches", ""): "from the newest checkpoint: `trainer.checkpoint_every` batches",
        ("relay", ""): "from the manifest of the oldest of `trainer.checkpoints_kept` checkpoints; before the "
        "first checkpoint, of the initial model",
        ("relay-chain", ""): _CHAIN,
    },
    "evaluation": {
        ("experiences", ""): "from the oldest experience of an active round: two rounds",
        ("relay", ""): _NOTE,
    },
    "autoscaler": {
        ("metrics", ""): _END,
        ("replicas", ""): _END,
        ("settled", ""): _END,
        ("scaling", ""): "from the last decision",
    },
    "relay": {
        ("relay", ""): "from the oldest manifest whose version the store holds: `relay.keep_versions`"
        + _NEW_TO_THE_RUN,
        ("relay-chain", ""): _CHAIN,
        ("replicas", ""): _END,
    },
}
"""By role: each topic that its starts read, as (short name, "" or LEDGER), and the bound on the records."""

OBSERVERS: Mapping[str, str] = {
    "metrics": "from the position of the previous observer (in metrics.jsonl), or the newest 20,000 offsets",
    "relay": "from the position of the previous observer, or the newest 100 offsets",
    "replicas": _END,
}
"""By short name: the topics that `laminar run`, `watch` and `metrics serve` read, and the bound."""
