"""`python -m fewbytes` is the command line."""

from fewbytes.cli import main

main()
