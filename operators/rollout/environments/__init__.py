"""Environments of multi-turn episodes."""
