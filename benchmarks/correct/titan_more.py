"""Two more layouts of docs/verify-recipes.md's torchtitan."""

from titan import compared


def tp():
    return compared(tp=2)


def hsdp():
    return compared(dp_replicate=2, dp_shard=2)
