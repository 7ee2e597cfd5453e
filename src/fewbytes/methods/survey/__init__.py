"""A survey: one exchange, without training, about what the sites have."""
