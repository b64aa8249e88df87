"""What is left of a run to read: metrics, summary, the page, and the closing lines."""
