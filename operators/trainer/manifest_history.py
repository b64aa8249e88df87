"""The trainer's view of the manifests in the relay topic: published batches, and the offset a restart reads from."""

from __future__ import annotations

from collections.abc import Collection

from schemas.records import PolicyVersion, WeightVersion


class PublishedBatches:
    """The `last` batch that any manifest covers, and `last_before_epoch`, the last one of an earlier epoch.

    -1: none. Both begin with `last`, which an earlier start has saved.
    """

    def __init__(self, epoch: int, last: int = -1) -> None:
        self._epoch = epoch
        self.last = self.last_before_epoch = last

    def add(self, manifest: WeightVersion) -> None:
        """Record the batches of `manifest`."""
        self.last = max([self.last, *manifest.batches])
        if manifest.version.epoch != self._epoch:
            self.last_before_epoch = max([self.last_before_epoch, *manifest.batches])


class ManifestOffsets:
    """Offsets of the manifests read so far, back to the oldest of the `kept` checkpoints.

    The trainer needs the manifest of the version it resumes from, to restore that version in the weight store. Any kept
    checkpoint may be that version: newer ones may be damaged. Before the first checkpoint it is the initial model. A
    clean stop makes a checkpoint of the newest version, after the last commit.
    """

    def __init__(self, kept: Collection[PolicyVersion]) -> None:
        self._kept = kept
        self._offsets: dict[PolicyVersion, int] = {}

    def add(self, version: PolicyVersion, offset: int) -> None:
        """Record that the manifest of `version` is at `offset`. If it was published twice, the first offset is kept."""
        self._offsets.setdefault(version, offset)

    def keep(self, kept: Collection[PolicyVersion]) -> None:
        """Set the kept checkpoints, and drop the offsets before the oldest of them."""
        self._kept = kept
        low = self.low_water(0)
        self._offsets = {version: offset for version, offset in self._offsets.items() if offset >= low}

    def low_water(self, position: int) -> int:
        """The offset from which a restart must read; `position` is the next offset to read."""
        newest = max(self._offsets, default=None)
        needed = (
            offset
            for version, offset in self._offsets.items()
            if version == newest or (version in self._kept if self._kept else version.number == 0)
        )
        return min(needed, default=position)
