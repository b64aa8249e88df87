"""A version pulled once, by somebody who is no relay, from whichever relay has it."""

from __future__ import annotations

from blake3 import blake3

from infra.transport.chunk_registry import Holding
from infra.transport.chunked_blob import full_blob
from infra.transport.fetch import Counts, Fetch
from infra.transport.frames import TransportError
from infra.transport.peer import Peer, dial
from infra.transport.throttle import Link
from infra.transport.tls import Tls
from infra.transport.topology import link_of
from schemas.records import RelayChain, WeightVersion


def download(
    manifest: WeightVersion, chain: RelayChain, run: str, token: str, memory: memoryview, tls: Tls | None = None
) -> None:
    """Fill `memory`, uint8[manifest.bytes], with a version, verified. Raises TransportError, ValueError for a lie."""
    cargo = full_blob(manifest)
    holding = Holding(memory, cargo)
    link, counts = Link(), Counts()

    def connect(source: int) -> Peer:
        stands = link_of(chain, source)
        assert stands is not None
        return dial(stands.address, run, token, -1, cargo, memory, link, False, tls)

    order = [each.relay for each in chain.links]
    if not Fetch(cargo, holding, (), order, connect, counts).run(lambda: False, lambda: None, patience=2):
        raise TransportError(f"none of {len(order)} relays could be asked for version {manifest.version}")
    if (digest := blake3(memory).hexdigest()) != manifest.blake3:
        raise ValueError(f"version {manifest.version} arrived with blake3 {digest}, not {manifest.blake3}")
