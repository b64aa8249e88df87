"""Where the manifests of kept checkpoints stand in the relay topic: a restart reads on from the oldest of them."""

from __future__ import annotations

from collections.abc import Collection

from schemas.records import PolicyVersion


class ManifestOffsets:
    """Offsets of the manifests read so far, as far back as the oldest of the `kept` checkpoints.

    A trainer needs the manifest of the version that it resumes from, to put that version back where it was lost. Which
    of the kept checkpoints that will be is not known: the newest may turn out to be damaged.
    """

    def __init__(self, kept: Collection[PolicyVersion]) -> None:
        self._kept = kept
        self._offsets: dict[PolicyVersion, int] = {}

    def add(self, version: PolicyVersion, offset: int) -> None:
        """The manifest of `version` stands at `offset`; of one that was published twice the first counts."""
        self._offsets.setdefault(version, offset)

    def keep(self, kept: Collection[PolicyVersion]) -> None:
        """These are the checkpoints from now on."""
        self._kept = kept
        low = self.low_water(0)
        self._offsets = {version: offset for version, offset in self._offsets.items() if offset >= low}

    def low_water(self, position: int) -> int:
        """The offset from which a restart must read, where `position` is the next one to read."""
        return min((self._offsets[version] for version in self._kept if version in self._offsets), default=position)
