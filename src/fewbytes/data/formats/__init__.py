"""Readers of files, a kind a module: of tables `read(path, schema)` gives columns, and what to say of the reading."""
