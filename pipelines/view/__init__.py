"""What a person sees of a run in the terminal, while it runs."""
