"""Readers of a run: its log, the audit, the state folded from its metrics, its folder."""
