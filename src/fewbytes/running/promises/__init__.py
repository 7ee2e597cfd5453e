"""What a run keeps to, and what it reports of each round: a file each, in one list (`every.py`)."""
