"""Readers of files of kinds that need a library of their own, one a module."""
