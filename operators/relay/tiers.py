"""The places beside its memory where a relay keeps copies of its newest version."""

from __future__ import annotations

from typing import NamedTuple

from infra.store.disk_tier import DiskTier
from infra.store.object_tier import ObjectTier
from infra.store.weight_store import WeightStore
from infra.system import SYSTEM, System
from operators.relay.config import RelayConfig
from schemas.records import PolicyVersion


class Tiers(NamedTuple):
    """Where a relay keeps copies of its newest version beside its memory, as configured."""

    disk: DiskTier | None = None
    objects: ObjectTier | None = None

    def keep(self, version: PolicyVersion, is_master: bool) -> None:
        """Copy `version`, the newest: to the disk, and as the run's master to the object store. Does not wait."""
        if self.disk is not None:
            self.disk.keep(version)
        if self.objects is not None and is_master:
            self.objects.keep(version)

    def close(self) -> None:
        """End the copies; those that are not complete are discarded."""
        for tier in self:
            if tier is not None:
                tier.close()


NO_TIERS = Tiers()


def open_tiers(config: RelayConfig, run: str, store: WeightStore, system: System = SYSTEM) -> Tiers:
    """The tiers of the configuration, for the versions of `store`. Raises StoreError for another user's folder."""
    disk, objects = config.copies_folder(run), config.objects_folder(run)
    return Tiers(
        None if disk is None else DiskTier(store, disk, config.disk_versions, system),
        None
        if objects is None
        else ObjectTier(store, objects, config.object_store_versions, config.object_store_every_s, system),
    )
