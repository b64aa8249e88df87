"""What tests of faults share: a broker behind a proxy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from faults.proxied_broker import ProxiedBroker, proxied_broker


@pytest.fixture(scope="session")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedBroker]:
    """A broker whose clients `proxied.proxied` are at the mercy of `proxied.proxy`; `proxied.direct` are not."""
    with proxied_broker(tmp_path_factory.mktemp("kafka")) as running:
        yield running
