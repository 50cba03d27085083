"""`bench` is not installed: its folder's parent is put on the path, however pytest was started."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
