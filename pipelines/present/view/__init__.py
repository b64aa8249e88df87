"""The live view of a run in the terminal, and the same metrics for Prometheus and Grafana."""
