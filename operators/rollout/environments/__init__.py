"""Episodes of many turns: a model writes, an environment answers, until one of them is done."""
