"""Publisher: the trainer's side of the relay tier. Its stall is one copy; the rest happens behind its back.

`publish` copies the tensors into the store's memory and returns. A thread then hashes, seals, appends the manifest to
the relay topic, evicts, and gets the next version's memory ready. At most one version is on its way; a publish that
comes too early is skipped where that is allowed, and what it would have told goes into the next manifest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from infra.store.chunks import DEFAULT_CHUNK_BYTES, chunk_checksums, chunk_size
from infra.store.deltas import encode_delta
from infra.store.errors import NoRoom, StoreBusy, StoreError
from infra.store.incoming_version import IncomingVersion
from infra.store.layout import Layout
from infra.store.names import weight_file
from infra.store.weight_store import WeightStore
from schemas.records import PolicyVersion, TensorSpec, WeightDelta, WeightVersion

log = logging.getLogger(__name__)

Copy = Callable[[np.ndarray, Any], None]
Announce = Callable[[WeightVersion], None]

MAX_DELTA_SHARE = 0.5
"""A delta of more than this share of the version is not worth its work."""
WRITER_WAIT_S = 10.0
"""How long another writer of the store is waited for, at first."""
FULL_EVERY = 16
"""Of so many versions one goes out without a delta, so that no error of one could live for ever."""


class PublishFailed(RuntimeError):
    """A version did not get out, `__cause__` says why; rollouts go on with the one before."""


def copy_array(place: np.ndarray, array: np.ndarray) -> None:
    """Copy `array` to `place`, uint8[bytes] of a file. Raises ValueError if it has another number of bytes."""
    if array.nbytes != place.nbytes:
        raise ValueError(f"an array of {array.nbytes} bytes does not fit the {place.nbytes} of its place")
    np.copyto(place.view(array.dtype).reshape(array.shape), array)


class Publisher:
    """Publishes versions whose tensors are always those of `specs`.

    `announce` makes a manifest known and returns once it is safe (see `announce.ManifestLog`). `parent` is the version
    that training began from. `copy(place, tensor)` copies a tensor of whatever kind to `place`, uint8[bytes]; the
    default takes numpy arrays. `deltas` says, at each version, whether anybody would take a delta.

    One thread uses a publisher, and nobody else writes to the store; close it before the
    store. Raises ValueError for specs that make no file.
    """

    def __init__(
        self,
        store: WeightStore,
        announce: Announce,
        specs: Sequence[TensorSpec],
        parent: PolicyVersion | None = None,
        copy: Copy = copy_array,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        deltas: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._announce = announce
        self._layout = Layout(specs)
        self._parent = parent
        self._copy = copy
        self._wall_ms = wall_ms
        self._chunk_bytes = chunk_size(self._layout.size, chunk_bytes)
        self._deltas = deltas
        self._since_full = 0
        self._thread = ThreadPoolExecutor(1, "publish weights")
        self._preparing = self._thread.submit(self._prepare)
        self._under_way: Future[WeightVersion] | None = None
        self._tried = parent
        self._sealed: WeightVersion | None = None
        """The manifest of the newest version that reached the store: written by the thread while one is on its way,
        read by the caller while none is."""
        self._untold: dict[int, bool] = {}
        """Batches taken that no manifest has told of, in order, and whether each was trained."""

    @property
    def published(self) -> PolicyVersion | None:
        """The newest version whose manifest is known to be out; `parent` before the first."""
        return self._parent

    def publish(
        self,
        tensors: Mapping[str, Any],
        version: PolicyVersion,
        *,
        step: int,
        batches: Sequence[int],
        batch_offsets: Sequence[int],
        trajectories_trained: int,
        untrained: Collection[int] = (),
        final: bool = False,
        must: bool = False,
    ) -> bool:
        """Copy `tensors` and let them go out as `version`; they may be changed as soon as this returns.

        `batches` are those taken since the last call, whatever became of that, `untrained` those of them of which
        nothing could be trained; the others are WeightVersion's fields.
        False: skipped, for the version before is on its way; `must` and `final` wait for that one instead. Raises
        PublishFailed if that one did not get out: this one was not tried, call again (with a version that failed, to
        try that anew). Raises NoRoom or another StoreError before anything is copied, and ValueError if version numbers
        do not rise or the tensors do not fit.
        """
        self._untold |= {batch: batch not in untrained for batch in batches}
        if self._under_way is not None and not self._under_way.done() and not (must or final):
            return False
        self._settle(None)
        if self._sealed is not None and version <= self._sealed.version:
            if version < self._sealed.version or version == self._parent:
                raise ValueError(f"version {version} does not follow {self._sealed.version}: versions rise")
            self._under_way = self._thread.submit(self._tell, self._sealed)  # its bytes are in place: only say so
            return True
        self._check(tensors)
        arriving = self._begin(version)
        try:
            self._fill(arriving, tensors)
        except BaseException:
            arriving.abort()
            raise
        self._tried = version
        told = WeightVersion(
            version=version,
            parent=self._parent,
            step=step,
            file=weight_file(version),
            bytes=arriving.size,
            blake3="",
            tensors=self._layout.specs,
            batches=tuple(self._untold),
            batch_offsets=tuple(batch_offsets),
            trajectories_trained=trajectories_trained,
            final=final,
            created_at=self._wall_ms(),
            untrained_batches=tuple(batch for batch, trained in self._untold.items() if not trained),
        )
        self._under_way = self._thread.submit(self._finish, arriving, told)
        return True

    def restore_version(self, tensors: Mapping[str, Any], manifest: WeightVersion) -> bool:
        """Bring back a version that is out, and whose `tensors` these are, where the store has lost it, and all newer
        ones, with its machine; whether that was so.

        Raises StoreError: no room, another writer, or the tensors are not what `manifest` says.
        """
        self._settle(None)
        newest = self._store.newest()
        if newest is not None and newest >= manifest.version:
            return False
        self._check(tensors)
        with self._begin(manifest.version) as arriving:
            self._fill(arriving, tensors)
            arriving.seal(manifest.blake3)
        return True

    def flush(self, timeout_s: float | None = None) -> None:
        """Return once nothing is on its way. Raises PublishFailed, or TimeoutError after `timeout_s` seconds."""
        self._settle(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Flush, and end the thread; the store stays open. Raises as `flush`; a second call does nothing."""
        try:
            self._settle(timeout_s)
        finally:
            self._thread.shutdown(wait=False)

    def _settle(self, timeout_s: float | None) -> None:
        """Wait for the version on its way and enter what became of it."""
        if not wait([self._preparing], timeout_s).done:
            raise TimeoutError(f"the memory for the first version was not ready after {timeout_s} s")
        if self._under_way is None:
            return
        if not wait([self._under_way], timeout_s).done:
            raise TimeoutError(f"version {self._tried} was not out after {timeout_s} s")
        under_way, self._under_way = self._under_way, None
        if (error := under_way.exception()) is not None:
            raise PublishFailed(f"version {self._tried} did not get out: {error}") from error
        manifest = under_way.result()
        self._parent = manifest.version
        for batch in manifest.batches:
            self._untold.pop(batch, None)

    def _check(self, tensors: Mapping[str, Any]) -> None:
        if tensors.keys() != self._layout.names:
            missing = sorted(self._layout.names - tensors.keys())[:3]
            strange = sorted(tensors.keys() - self._layout.names)[:3]
            raise ValueError(f"the tensors are not those of the first version: missing {missing}, new {strange}")

    def _begin(self, version: PolicyVersion) -> IncomingVersion:
        try:
            return self._store.begin(version, self._layout.size)
        except NoRoom:
            if not self._store.evict():  # readers may have let go since
                raise
            return self._store.begin(version, self._layout.size)

    def _fill(self, arriving: IncomingVersion, tensors: Mapping[str, Any]) -> None:
        arriving.view[: len(self._layout.header)] = self._layout.header
        for name, place in self._layout.places(arriving.view).items():
            try:
                self._copy(place, tensors[name])
            except (ValueError, TypeError, RuntimeError) as error:
                raise ValueError(f"tensor {name!r} does not fit its place of {place.nbytes} bytes: {error}") from error

    def _finish(self, arriving: IncomingVersion, told: WeightVersion) -> WeightVersion:
        """Everything after the copy; runs in the publisher's thread."""
        checks = chunk_checksums(arriving.view, self._chunk_bytes)
        sealed = replace(told, blake3=arriving.seal().blake3, chunk_bytes=self._chunk_bytes, chunk_checksums=checks)
        self._sealed = replace(sealed, delta=self._delta(self._sealed, sealed))
        return self._tell(self._sealed)

    def _delta(self, parent: WeightVersion | None, child: WeightVersion) -> WeightDelta | None:
        """What turns the last version that reached the store into this one, kept beside it; None where it is not worth
        it.
        """
        self._since_full += 1
        if parent is None or self._since_full >= FULL_EVERY or not self._deltas():
            self._since_full = 0
            return None
        try:
            with (
                self._store.read(parent.version, parent.blake3) as before,
                self._store.read(child.version) as after,
            ):
                delta = encode_delta(before, after, self._layout.spans())
            if len(delta) > MAX_DELTA_SHARE * child.bytes:
                return None
            self._store.add_delta(child.version, delta)
        except StoreError as error:  # the full version is there: nobody needs more
            log.warning("version %s goes out without a delta: %s", child.version, error)
            return None
        return WeightDelta(
            parent.version, parent.blake3, len(delta), chunk_checksums(memoryview(delta), self._chunk_bytes)
        )

    def _tell(self, manifest: WeightVersion) -> WeightVersion:
        try:
            self._announce(manifest)
        finally:
            self._store.evict()
        self._reserve()
        return manifest

    def _prepare(self) -> None:
        """Become the store's writer, and get memory ready. A relay that looks for what nobody has lets others go first
        now and then.
        """
        deadline = time.monotonic() + WRITER_WAIT_S
        while time.monotonic() < deadline:
            try:
                self._store.reserve(self._layout.size)
            except StoreBusy:
                time.sleep(0.01)
                continue
            except StoreError:  # the first publish needs the room itself, and says so
                pass
            return

    def _reserve(self) -> None:
        """Get memory ready for the next version: making pages takes many times as long as copying into them."""
        with suppress(StoreError):  # the next publish needs the room itself, and says so
            self._store.reserve(self._layout.size)
