"""A run's report: summary, verdict, charts and HTML page."""
