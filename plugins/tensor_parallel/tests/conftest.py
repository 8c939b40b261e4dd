"""The helpers beside these tests, here and in the ranks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
