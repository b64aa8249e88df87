"""Replicas that run a model in stages while it is being loaded."""
