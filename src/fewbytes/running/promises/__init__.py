"""A run's promises, which limit it or report on each round: one file each, listed in `every.py`."""
