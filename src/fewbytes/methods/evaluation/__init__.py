"""Evaluation: models on the sites' test samples, without training."""
