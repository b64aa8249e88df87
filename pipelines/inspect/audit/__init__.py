"""The proof that no trajectory was lost or trained twice, from the raw topics alone (invariant 2)."""
