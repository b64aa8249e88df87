"""`laminar run`: a complete run on one machine."""
