"""Experiments as the command line and config files describe them: one run, a comparison, a plan, a deployment."""
