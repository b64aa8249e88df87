"""ClosedAtExit: what is closed at the end of a `with` statement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class ClosedAtExit(ABC):
    """An object that is closed at the end of a `with` statement."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close it."""
