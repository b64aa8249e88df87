"""The shared fixture of fault tests: a broker behind a proxy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from faults.proxied_broker import ProxiedBroker, proxied_broker


@pytest.fixture(scope="session")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedBroker]:
    """A broker; clients of `proxied.proxied` connect through `proxied.proxy`, clients of `proxied.direct` do not."""
    with proxied_broker(tmp_path_factory.mktemp("kafka")) as running:
        yield running
