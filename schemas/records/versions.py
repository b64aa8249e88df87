"""Weight versions and their manifests."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

_VERSION = re.compile(r"([0-9]{1,18})\.([0-9]{1,18})")


@dataclass(frozen=True, order=True, slots=True)
class PolicyVersion:
    """A weight version: trainer epoch (raised by every trainer restart), then number (optimizer steps so far)."""

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """The version written as `text`, "epoch.number". Raises ValueError."""
        match = _VERSION.fullmatch(text)
        if match is None:
            raise ValueError(f"not a policy version: {text[:80]!r} (expected 'epoch.number', e.g. '1.12')")
        return cls(int(match[1]), int(match[2]))


LATEST = "latest"
NAMES = rf"{LATEST}|v[0-9]{{1,18}}|{_VERSION.pattern}"
"""What people may call a version: also v12, the newest with the number 12."""


def named_version(name: str, versions: Collection[PolicyVersion]) -> PolicyVersion | None:
    """The newest of `versions` that `name` names, see `NAMES`; None if there is none. Raises ValueError."""
    if name == LATEST:
        return max(versions, default=None)
    if name[:1] == "v" and re.fullmatch(NAMES, name):
        return max((each for each in versions if each.number == int(name[1:])), default=None)
    wanted = PolicyVersion.parse(name)
    return wanted if wanted in versions else None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a weight file, with safetensors' name of its dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightDelta:
    """A delta from the bytes of version `parent`, whose blake3 is `parent_blake3`, to those of the next version.

    `chunk_checksums` are the CRC-32C of its chunks, which are as long as those of the version.
    """

    parent: PolicyVersion
    parent_blake3: str
    bytes: int
    chunk_checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """The manifest of one weight version; its bytes are in the relay tier.

    Written by the trainer, read by relay, rollout, placement, experience and evaluation.

    `batches` are the numbers of the global batches taken since `parent`; `untrained_batches` are those among them that
    could not be trained. `batch_offsets` are the trainer's positions, by partition of the batches topic. `final`: the
    last version of a run. `blake3` is that of the whole file, `chunk_checksums` are the CRC-32C of each `chunk_bytes`
    of it. `delta` is set if it is smaller than the file.
    """

    version: PolicyVersion
    parent: PolicyVersion | None
    step: int
    file: str
    bytes: int
    blake3: str
    tensors: tuple[TensorSpec, ...]
    batches: tuple[int, ...]
    batch_offsets: tuple[int, ...]
    trajectories_trained: int
    final: bool
    created_at: int
    chunk_bytes: int = 0
    chunk_checksums: tuple[int, ...] = ()
    delta: WeightDelta | None = None
    untrained_batches: tuple[int, ...] = ()
