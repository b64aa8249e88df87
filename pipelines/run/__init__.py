"""`laminar run`: a whole run on one machine, from an empty folder to a report."""
