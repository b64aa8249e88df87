"""Publisher: the trainer's side of the relay tier. The trainer waits for one copy at most; the rest runs in a thread.

`publish` copies the tensors into the store's memory and returns; those that write themselves may be written meanwhile.
The thread then hashes and seals the version, publishes the manifest to the relay topic, evicts old versions, and
reserves memory for the next version. At most one version is pending: a publish before it is complete may be skipped,
and its batches go into the next manifest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from infra.clocks import wall_ms
from infra.store.chunks import DEFAULT_CHUNK_BYTES, chunk_checksums, chunk_size
from infra.store.deltas import encode_delta
from infra.store.errors import NoRoom, StoreBusy, StoreError
from infra.store.incoming_version import IncomingVersion
from infra.store.layout import Layout
from infra.store.names import weight_file
from infra.store.weight_store import WeightStore
from infra.system import SYSTEM, System
from schemas.records import PolicyVersion, TensorSpec, WeightDelta, WeightVersion

log = logging.getLogger(__name__)

Copy = Callable[[np.ndarray, Any], None]


class Tensors(Protocol):
    """Tensors by name, such as a dict. `items` may produce them one at a time, and only once they are taken."""

    def keys(self) -> Set[str]: ...

    def items(self) -> Iterable[tuple[str, Any]]: ...


@runtime_checkable
class TensorWriter(Protocol):
    """Tensors by name that write themselves, such as those of which several processes hold parts.

    They change only once they are written.
    """

    def keys(self) -> Set[str]: ...

    def write_to(self, file: Path, views: Mapping[str, np.ndarray]) -> Callable[[], None]:
        """Begin to write every tensor into `file`, which this process maps: its bytes are in `views`, uint8[bytes].

        The returned call, in any thread, waits until all are written, and raises what that raised.
        """


Announce = Callable[[WeightVersion], None]

MAX_DELTA_SHARE = 0.5
"""A delta larger than this share of the version is not published."""
WRITER_WAIT_S = 10.0
"""Seconds to wait at the start for another writer of the store."""
FULL_EVERY = 16
"""One of so many versions is published without a delta, so that an error in a delta cannot persist."""


class PublishFailed(RuntimeError):
    """A version was not published, see `__cause__`; rollouts continue with the previous one."""


def copy_array(target: np.ndarray, array: np.ndarray) -> None:
    """Copy `array` to `target`, uint8[bytes] of a file. Raises ValueError if their sizes differ."""
    if array.nbytes != target.nbytes:
        raise ValueError(f"an array of {array.nbytes} bytes does not fit into {target.nbytes} bytes")
    np.copyto(target.view(array.dtype).reshape(array.shape), array)


class Publisher:
    """Publishes versions whose tensors are always those of `specs`.

    `announce` publishes a manifest and returns once it is durable (see `announce.ManifestLog`). `parent` is the version
    from which training started. `copy(target, tensor)` copies a tensor of any kind to `target`, uint8[bytes]; the
    default accepts numpy arrays. `deltas()` returns, for each version, whether a relay would use a delta.

    Use a publisher from one thread, with no other writer of the store, and close it before the store. Raises ValueError
    for invalid specs.
    """

    def __init__(
        self,
        store: WeightStore,
        announce: Announce,
        specs: Sequence[TensorSpec],
        parent: PolicyVersion | None = None,
        copy: Copy = copy_array,
        wall_ms: Callable[[], int] = wall_ms,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        deltas: Callable[[], bool] = lambda: False,
        system: System = SYSTEM,
    ) -> None:
        self._system = system
        self._store = store
        self._announce = announce
        self._layout = Layout(specs)
        self.published = parent
        """The newest version whose manifest is published; `parent` before the first."""
        self._copy = copy
        self._wall_ms = wall_ms
        self._chunk_bytes = chunk_size(self._layout.size, chunk_bytes)
        self._deltas = deltas
        self._since_full = 0
        self._executor = system.pool(1, "publish weights")
        self._prepared = self._executor.submit(self._prepare)
        self._pending: Future[WeightVersion] | None = None
        self._attempted = parent
        self._sealed: WeightVersion | None = None
        """The manifest of the newest sealed version: written by the thread while a version is pending, else read by the
        caller."""
        self._unannounced: dict[int, bool] = {}
        """Consumed batches that are in no published manifest, in order, and whether each was trained."""

    def publish(
        self,
        tensors: Tensors | TensorWriter,
        version: PolicyVersion,
        *,
        step: int,
        batches: Sequence[int],
        batch_offsets: Sequence[int],
        trajectories_trained: int,
        untrained: Collection[int] = (),
        final: bool = False,
        wait_for_previous: bool = False,
    ) -> bool:
        """Copy `tensors` and publish them as `version` in the background; arrays may change as soon as this returns.

        `batches` are those consumed since the last call, whatever its result; `untrained` are those of them of which
        nothing was trained; the others are fields of WeightVersion. Returns False if it is skipped because the previous
        version is still pending; with `wait_for_previous` or `final` it waits for that version instead.

        Raises PublishFailed if the previous version was not published: this one was not attempted, so call again (with
        the failed version to retry it). Raises NoRoom or another StoreError before anything is copied, and ValueError
        if version numbers do not increase or the tensors do not match the specs.
        """
        self._unannounced |= {batch: batch not in untrained for batch in batches}
        if self._pending is not None and not self._pending.done() and not (wait_for_previous or final):
            return False
        self.flush()
        if self._sealed is not None and version <= self._sealed.version:
            if version < self._sealed.version or version == self.published:
                raise ValueError(
                    f"version {version} does not follow {self._sealed.version}: version numbers must increase"
                )
            self._pending = self._executor.submit(
                self._announce_manifest, self._sealed
            )  # its bytes are stored: only announce it
            return True
        self._check(tensors)
        arriving = self._start_version(version)
        try:
            wait_until_written = self._fill(arriving, tensors)
        except BaseException:
            arriving.abort()
            raise
        self._attempted = version
        manifest = WeightVersion(
            version=version,
            parent=self.published,
            step=step,
            file=weight_file(version),
            bytes=arriving.size,
            blake3="",
            tensors=self._layout.specs,
            batches=tuple(self._unannounced),
            batch_offsets=tuple(batch_offsets),
            trajectories_trained=trajectories_trained,
            final=final,
            created_at=self._wall_ms(),
            untrained_batches=tuple(batch for batch, trained in self._unannounced.items() if not trained),
        )
        self._pending = self._executor.submit(self._seal_and_announce, arriving, manifest, wait_until_written)
        return True

    def restore_version(self, tensors: Tensors | TensorWriter, manifest: WeightVersion) -> bool:
        """Write a published version with these `tensors` back to a store that has lost it and all newer ones.

        Returns whether that was necessary. Raises StoreError: no memory, another writer, or the tensors do not match
        `manifest`.
        """
        self.flush()
        newest = self._store.newest()
        if newest is not None and newest >= manifest.version:
            return False
        self._check(tensors)
        with self._start_version(manifest.version) as arriving:
            self._fill(arriving, tensors)()
            arriving.seal(manifest.blake3)
        return True

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until no version is pending. Raises PublishFailed, or TimeoutError after `timeout_s` seconds."""
        if not self._executor.wait(self._prepared, timeout_s):
            raise TimeoutError(f"the memory for the first version was not ready after {timeout_s} s")
        if self._pending is None:
            return
        if not self._executor.wait(self._pending, timeout_s):
            raise TimeoutError(f"version {self._attempted} was not published after {timeout_s} s")
        pending, self._pending = self._pending, None
        if (error := pending.exception()) is not None:
            raise PublishFailed(f"version {self._attempted} was not published: {error}") from error
        manifest = pending.result()
        self.published = manifest.version
        for batch in manifest.batches:
            self._unannounced.pop(batch, None)

    def close(self, timeout_s: float | None = None) -> None:
        """Flush and stop the thread; the store stays open. Raises as `flush`; a second call does nothing."""
        try:
            self.flush(timeout_s)
        finally:
            self._executor.shutdown(wait=False)

    def _check(self, tensors: Tensors | TensorWriter) -> None:
        if tensors.keys() != self._layout.names:
            missing = sorted(self._layout.names - tensors.keys())[:3]
            strange = sorted(tensors.keys() - self._layout.names)[:3]
            raise ValueError(f"the tensors are not those of the specs: missing {missing}, unexpected {strange}")

    def _start_version(self, version: PolicyVersion) -> IncomingVersion:
        try:
            return self._store.begin(version, self._layout.size)
        except NoRoom:
            if not self._store.evict():  # readers may have released versions since
                raise
            return self._store.begin(version, self._layout.size)

    def _fill(self, arriving: IncomingVersion, tensors: Tensors | TensorWriter) -> Callable[[], None]:
        """Write `tensors`; those that write themselves are written once the returned call has returned."""
        arriving.view[: len(self._layout.header)] = self._layout.header
        views = self._layout.tensor_views(arriving.view)
        if isinstance(tensors, TensorWriter):
            return tensors.write_to(arriving.path, views)
        for name, tensor in tensors.items():
            target = views[name]
            try:
                self._copy(target, tensor)
            except (ValueError, TypeError, RuntimeError) as error:
                raise ValueError(f"tensor {name!r} does not fit into {target.nbytes} bytes: {error}") from error
        return lambda: None

    def _seal_and_announce(
        self, arriving: IncomingVersion, manifest: WeightVersion, wait_until_written: Callable[[], None]
    ) -> WeightVersion:
        """All steps after the copy; runs in the publisher's thread."""
        try:
            wait_until_written()
        except BaseException:
            arriving.abort()
            raise
        checks = chunk_checksums(arriving.view, self._chunk_bytes)
        sealed = replace(manifest, blake3=arriving.seal().blake3, chunk_bytes=self._chunk_bytes, chunk_checksums=checks)
        self._sealed = replace(sealed, delta=self._delta(self._sealed, sealed))
        return self._announce_manifest(self._sealed)

    def _delta(self, parent: WeightVersion | None, child: WeightVersion) -> WeightDelta | None:
        """Store the delta from the last sealed version to this one and return its entry; None if it is not worth it."""
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
        except StoreError as error:  # the full version is stored, which is enough
            log.warning("version %s is published without a delta: %s", child.version, error)
            return None
        return WeightDelta(
            parent.version, parent.blake3, len(delta), chunk_checksums(memoryview(delta), self._chunk_bytes)
        )

    def _announce_manifest(self, manifest: WeightVersion) -> WeightVersion:
        try:
            self._announce(manifest)
        finally:
            self._store.evict()
        with suppress(StoreError):  # the next publish reports the lack of memory
            self._store.reserve(self._layout.size)  # pages take many times as long to allocate as to copy into
        return manifest

    def _prepare(self) -> None:
        """Become the store's writer and reserve memory. The machine's relay releases the store between fetches."""
        deadline = self._system.monotonic() + WRITER_WAIT_S
        while self._system.monotonic() < deadline:
            try:
                self._store.reserve(self._layout.size)
            except StoreBusy:
                self._system.sleep(0.01)
                continue
            except StoreError:  # the first publish reports the lack of memory
                pass
            return
