"""Trimming the log of a run: which records may go, what they were, and the mark that records it."""
