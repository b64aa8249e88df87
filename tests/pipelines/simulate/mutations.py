"""Planted defects of the protocols. Each is a patch of one function, and the simulation has to find it.

A mutation takes a pytest.MonkeyPatch and applies itself; its docstring says what is wrong then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from log_mutations import LOG_MUTATIONS
from rank_mutations import RANK_MUTATIONS
from step_mutations import STEP_MUTATIONS
from transfer_mutations import TRANSFER_MUTATIONS

Mutation = Callable[[pytest.MonkeyPatch], None]
MUTATIONS: Mapping[str, Mutation] = {
    each.__name__: each for each in (*LOG_MUTATIONS, *STEP_MUTATIONS, *TRANSFER_MUTATIONS, *RANK_MUTATIONS)
}
"""All planted defects, by name."""
