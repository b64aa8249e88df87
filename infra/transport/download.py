"""Downloads one version from any relay that has it, for a process that is not a relay."""

from __future__ import annotations

from blake3 import blake3

from infra.transport.chunk_registry import BlobBuffer
from infra.transport.chunked_blob import full_blob
from infra.transport.fetch import Fetch, TransferCounts
from infra.transport.frames import TransportError
from infra.transport.peer import Peer, dial
from infra.transport.throttle import Link
from infra.transport.tls import Tls
from infra.transport.topology import find_link
from schemas.records import RelayChain, WeightVersion


def download(
    manifest: WeightVersion, chain: RelayChain, run: str, token: str, memory: memoryview, tls: Tls | None = None
) -> None:
    """Fill `memory`, uint8[manifest.bytes], with a version and verify it.

    Raises TransportError, and ValueError for bytes that do not match the manifest.
    """
    blob = full_blob(manifest)
    buffer = BlobBuffer(memory, blob)
    link, counts = Link(), TransferCounts()

    def connect(source: int) -> Peer:
        link_of_source = find_link(chain, source)
        assert link_of_source is not None
        return dial(link_of_source.address, run, token, -1, blob, memory, link, False, tls)

    order = [each.relay for each in chain.links]
    if not Fetch(blob, buffer, (), order, connect, counts).run(lambda: False, lambda: None, max_attempts=2):
        raise TransportError(f"none of {len(order)} relays delivered version {manifest.version}")
    if (digest := blake3(memory).hexdigest()) != manifest.blake3:
        raise ValueError(f"version {manifest.version} arrived with blake3 {digest}, expected {manifest.blake3}")
