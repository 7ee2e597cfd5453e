import sys
from pathlib import Path

from second_golden import write

write(Path(sys.argv[1]), *map(int, sys.argv[2:]))
