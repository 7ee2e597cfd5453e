"""What everything else stands on: errors, files, named randomness, state, units."""
