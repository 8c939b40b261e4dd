"""What stands in the metadata file of a distributed checkpoint: a pickle that names torch's private classes.

Needs `torch.distributed.checkpoint.filesystem._StorageInfo`, and the names of two functions that such files mention,
in torch 2.11 to 2.15. Test: tests/checkpoint/test_hostile.py.
"""

from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["MENTIONED", "StorageInfo"]

# (module, name) of what a file mentions, and a reader does not need.
MENTIONED = (("torch.serialization", "_get_layout"), (metadata.__name__, "_MEM_FORMAT_ENCODING"))
