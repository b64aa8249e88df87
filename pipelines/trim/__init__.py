"""Trimming the log of a run: what may go, what it was, and the mark that says so."""
