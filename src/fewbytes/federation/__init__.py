"""Federations: a folder that outlives runs, with the CA, the address, the members' public keys and a history."""
