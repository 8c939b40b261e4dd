"""The names of an adapter's two matrices, beside the one that they adapt."""

SUFFIXES = ("lora_A", "lora_B")


def pair(fqn: str) -> tuple[str, str]:
    """Those of parameter `fqn`: `wq.lora_A` for `wq.weight`, `experts.w1_lora_A` for `experts.w1`."""
    stem = fqn.removesuffix("weight") if fqn.rpartition(".")[2] == "weight" else f"{fqn}_"
    return f"{stem}{SUFFIXES[0]}", f"{stem}{SUFFIXES[1]}"
