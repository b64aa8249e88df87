"""The assignments of a replica that have not started, and the KV that is fetched for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future

from infra.transport.kv_transfer import KVTransfers
from operators.rollout.engine import KV
from schemas.records import Assignment, PolicyVersion

log = logging.getLogger(__name__)


class IncomingKV:
    """Fetches the KV of assignments that were handed over to replica `index`.

    `reused` counts the assignments that start with their KV, `recomputed` those whose KV could not be used.
    """

    def __init__(self, index: int, transfers: KVTransfers | None) -> None:
        self._index, self._transfers = index, transfers
        self._fetches: dict[str, tuple[int, Future[memoryview]]] = {}
        """By trajectory: the lease of the assignment, and the fetch."""
        self.reused = self.recomputed = 0

    def __len__(self) -> int:
        return len(self._fetches)

    def fetch(self, assignment: Assignment) -> None:
        """Start to fetch the KV of `assignment`, if it has any."""
        if assignment.kv is not None and self._transfers is not None:
            self._fetches[assignment.trajectory_id] = assignment.lease, self._transfers.fetch(assignment.kv)

    def pending(self, trajectory_id: str) -> bool:
        """Whether the KV of this trajectory is still being fetched."""
        fetch = self._fetches.get(trajectory_id)
        return fetch is not None and not fetch[1].done()

    def discard(self, trajectory_id: str) -> None:
        """Drop the KV of a trajectory that does not start here."""
        self._fetches.pop(trajectory_id, None)

    def take(self, assignment: Assignment, loaded: PolicyVersion | None) -> KV | None:
        """The KV for `assignment` under weight version `loaded`; None if it has none or its KV cannot be used."""
        lease, fetch = self._fetches.pop(assignment.trajectory_id, (0, None))
        manifest = assignment.kv
        if manifest is None:
            return None
        error: BaseException | str | None = "it was computed under other weights"
        if fetch is None or lease != assignment.lease:
            error = "it was not fetched"
        elif manifest.policy_version == loaded:
            error = fetch.exception()
        if fetch is None or error is not None:
            self.recomputed += 1
            log.info("replica %d recomputes the KV of %s: %s", self._index, assignment.trajectory_id, error)
            return None
        self.reused += 1
        return KV(manifest.tokens, fetch.result())


class WaitingAssignments:
    """A queue of assignments, one per trajectory; `kv` has their KV."""

    def __init__(self, kv: IncomingKV) -> None:
        self._queue: dict[str, Assignment] = {}
        self._outdated: PolicyVersion | None = None
        """The loaded version, if all of them need a newer one: they are not compared before each step of the engine."""
        self.kv = kv

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Assignment]:
        return iter(self._queue.values())

    @property
    def next_version(self) -> PolicyVersion | None:
        """The version that the first assignment names; None if there is no assignment or it names none."""
        return next(iter(self)).policy_version if self._queue else None

    def may_begin(
        self, loaded: PolicyVersion, would_load: Callable[[PolicyVersion | None], PolicyVersion | None]
    ) -> bool:
        """Whether one of them can start under version `loaded`, or an empty engine would load another now.

        Otherwise they wait for weights that are not on this machine yet.
        """
        if any(each.policy_version in (None, loaded) and not _is_newer(each, loaded) for each in self):
            return True
        return bool(self) and would_load(self.next_version) is not None

    def find(self, trajectory_id: str) -> Assignment | None:
        """The assignment of this trajectory."""
        return self._queue.get(trajectory_id)

    def add(self, assignment: Assignment) -> None:
        """Queue `assignment`; of two assignments of a trajectory the one with the later lease is kept."""
        name = assignment.trajectory_id
        self._outdated = None
        if (waiting := self._queue.get(name)) is not None:
            self._queue[name] = max(waiting, assignment, key=lambda each: each.lease)  # keeps its place
            return
        self._queue[name] = assignment
        self.kv.fetch(assignment)

    def cancel(self, leases: Mapping[str, int]) -> None:
        """Remove these trajectories, except those with a later lease."""
        for name, lease in leases.items():
            if (waiting := self._queue.get(name)) is not None and waiting.lease <= lease:
                self.remove(waiting)

    def remove(self, assignment: Assignment) -> None:
        """Remove `assignment` and its KV."""
        del self._queue[assignment.trajectory_id]
        self.kv.discard(assignment.trajectory_id)

    def take_ready(self, loaded: PolicyVersion, available: Callable[[], Collection[PolicyVersion]]) -> list[Assignment]:
        """Remove and return, in order, the assignments that start under version `loaded`, and those that cannot start
        because the version they name is gone.

        The others stay: their KV is still being fetched, or they name another `available` version or need a newer one,
        which is loaded once the engine is empty; or their prompt names a version that has not arrived yet.
        """
        if loaded == self._outdated:
            return []
        ready: list[Assignment] = []
        staying: dict[str, Assignment] = {}
        versions: Collection[PolicyVersion] | None = None
        outdated = True
        for name, assignment in self._queue.items():
            if assignment.policy_version in (None, loaded):
                newer = _is_newer(assignment, loaded)
                stays = newer or self.kv.pending(name)
            else:
                newer = False
                versions = available() if versions is None else versions
                stays = assignment.policy_version in versions or _may_arrive(assignment, versions)
            if stays:
                staying[name] = assignment
                outdated = outdated and newer
            else:
                ready.append(assignment)
        self._queue, self._outdated = staying, loaded if outdated else None
        return ready


def _may_arrive(assignment: Assignment, available: Collection[PolicyVersion]) -> bool:
    """Whether the version that the prompt of `assignment` names may still arrive: versions arrive in order."""
    named = assignment.prompt.policy_version
    return named is not None and all(version < named for version in available)


def _is_newer(assignment: Assignment, loaded: PolicyVersion) -> bool:
    """Whether `assignment` needs a newer version than `loaded`."""
    return assignment.at_least is not None and loaded < assignment.at_least
