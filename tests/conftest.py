"""One thread per rank. Ranks come from the plugin of `plait.testing`, helpers from `tests.helpers`."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
