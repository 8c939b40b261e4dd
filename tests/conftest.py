"""What all tests share: the helpers beside them. Ranks come from the plugin of `plait.testing`."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
for folder in (".", "core", "mutants", "run"):  # helpers of the tests, here and in the ranks
    sys.path.insert(0, str(Path(__file__).parent / folder))
