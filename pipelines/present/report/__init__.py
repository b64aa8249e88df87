"""A run's report: summary, verdict, charts, page."""
