"""Analyses of finished runs: what a model encodes at each layer, what uploads and models reveal."""
