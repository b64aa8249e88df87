"""Checks of this machine: what is missing, and how to fix it."""
