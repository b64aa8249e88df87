"""The proof that nothing was lost and nothing trained twice, from the raw topics alone (invariant 2)."""
