"""Weight transfer between machines: a framed TCP protocol, transfer schedules, and fetching with repair."""
