"""Publishes the trainer's versions: batches that no manifest names yet, retries, and the version it resumed from."""

from __future__ import annotations

import logging

from infra.store.errors import CorruptVersion, StoreError
from infra.store.publisher import PublishFailed
from operators.trainer.publishing import Publishing
from operators.trainer.rank_training import RankTraining
from schemas.records import PolicyVersion, WeightVersion

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause before a failed publish is retried; doubled after each further failure."""
MAX_RETRY_S = 16.0


class VersionPublisher:
    """Publishes the weights of `training` by `publishing`."""

    resumed: WeightVersion | None
    """The manifest of the version that training resumed from, until that version is known to be in the store: a machine
    that restarts loses its store. Without a checkpoint it is the first manifest of the initial model, which evaluation
    names in its questions, whatever the epoch of this start."""
    behind: bool
    """Whether the weights have changed since the last version that was published."""

    def __init__(self, publishing: Publishing, training: RankTraining) -> None:
        self._publishing, self._training = publishing, training
        self._publisher, self._clock = publishing.publisher, training.rendezvous.services.system.monotonic
        self._batches: list[int] = []
        self._untrained: list[int] = []
        self._retry_at = self._pause = 0.0
        self._replacing: PolicyVersion | None = None
        """The version of this start that replaces `resumed`, which was lost for good."""
        self.resumed = None
        self.behind = False

    def add_batch(self, number: int, *, trained: bool) -> None:
        """Record that batch `number` was taken; the next version's manifest names it."""
        self.resumed = None  # a newer version replaces it
        self._batches.append(number)
        if not trained:
            self._untrained.append(number)

    def add_manifest(self, manifest: WeightVersion) -> None:
        """Record a manifest of the log, which may be that of the version that training resumed from."""
        version, resumed_from = manifest.version, self._training.resumed_from
        is_initial = version.number == 0 and self._training.trained == 0 and self.resumed is None
        if version == resumed_from or (resumed_from is None and is_initial):
            self.resumed = manifest

    def publish(self, *, wait_for_previous: bool = False, wait: bool = False) -> bool:
        """Publish the current weights as the current version, and return whether that succeeded.

        A version that is still in transit delays this one: the weights are then published with a later version, unless
        `wait_for_previous` is set. `wait` also waits until this version's manifest is in the log.
        """
        self.behind = not (self._send(wait_for_previous=wait_for_previous or wait) and (not wait or self._flush()))
        if not self.behind:
            self._pause = 0.0
        return not self.behind

    def retry_due(self) -> bool:
        """Whether a version is to be published or restored now, because that failed or was skipped before."""
        if not self.behind:
            self.behind = self._has_failed()
        if not (self.behind or self.resumed) or self._clock() < self._retry_at:
            return False
        self._pause = min(max(RETRY_S, 2 * self._pause), MAX_RETRY_S)
        self._retry_at = self._clock() + self._pause
        return True

    def restore_resumed(self) -> None:
        """Restore `resumed` to the store: rollouts need it, and without them there may be no further batch.

        Weights with other bits than before, as those that LoRA's adapters are merged into on other hardware, are not
        that version: `behind` is set, and they are published as one of this start.
        """
        if (resumed := self.resumed) is None:
            return
        try:
            self._publishing.restore_version(self._training.joint, resumed)
            self.resumed = None
        except CorruptVersion as error:
            self._replacing = PolicyVersion(self._training.epoch, resumed.version.number)
            self.resumed, self.behind = None, True
            lost = "version %s is lost, and its weights have other bits on this machine: they are published as %s (%s)"
            log.warning(lost, resumed.version, self._replacing, error)
        except StoreError as error:
            log.error("version %s is not in the store: %s", resumed.version, error)
        except PublishFailed as error:  # of the version in transit, which had to end first
            log.error("%s", error)
            self.behind = True

    def _send(self, *, wait_for_previous: bool) -> bool:
        position, batches, untrained = self._training.position, self._batches, self._untrained
        self._batches, self._untrained = [], []  # the publisher keeps the batches that no manifest names yet
        version = max(position.version, self._replacing or position.version)
        try:
            return self._publisher.publish(
                self._training.joint,
                version,
                step=version.number,
                batches=batches,
                untrained=untrained,
                batch_offsets=position.batch_offsets,
                trajectories_trained=position.trajectories_trained,
                final=self._training.done,
                wait_for_previous=wait_for_previous,
            )
        except (PublishFailed, StoreError) as error:
            log.error("version %s is not published, rollouts keep the one before: %s", version, error)
            return False

    def _flush(self) -> bool:
        try:
            self._publisher.flush()
        except PublishFailed as error:
            log.error("version %s is not published yet: %s", self._training.position.version, error)
            return False
        return True

    def _has_failed(self) -> bool:
        """Whether the publish of the version in transit has failed."""
        try:
            self._publisher.flush(timeout_s=0)
        except TimeoutError:
            return False
        except PublishFailed as error:
            log.error("%s", error)
            return True
        return False
