"""Deployment files of a run, made of its configuration."""
