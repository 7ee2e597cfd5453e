"""Foundations of all other packages: errors, files, named randomness, state, units."""
