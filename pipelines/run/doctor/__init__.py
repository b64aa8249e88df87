"""What can run on this machine, what is missing, and what fixes it."""
