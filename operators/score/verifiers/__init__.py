"""The built-in verifiers, by what they compare: texts, entries of reasoning-gym, programs; and users' functions."""
