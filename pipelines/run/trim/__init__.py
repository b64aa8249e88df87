"""Trimming the log of a run: which records may go, what they were, and the trim point that records it."""
