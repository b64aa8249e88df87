"""Processes that run what users wrote: bounded, replaceable, spoken to in JSON."""
