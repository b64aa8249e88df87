"""Trimming the log of a run: which records may be deleted, and the trim point that describes them."""
