"""The error of a rank that must end because another one has. It does not import torch."""

from __future__ import annotations


class RankLost(RuntimeError):
    """Another process of the rendezvous has ended: this one must end, too."""
