"""The live view of a run in the terminal, and the same figures for Prometheus and Grafana."""
