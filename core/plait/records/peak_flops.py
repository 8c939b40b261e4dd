"""The speed of a GPU's matrix products: what `mfu` is a share of."""

import re

# Dense products in bfloat16 or float16 with sums in float32, in TFLOP/s per torch device, for devices that no file in
# conf/cluster/ describes. Vendors print figures "with sparsity": these are half of them.
_OTHERS = (
    (r"GB[23]00", 2500.0),  # NVIDIA GB200 NVL72 and GB300 NVL72 product pages: 360 PFLOP/s sparse over 72
    (r"B300", 2250.0),  # NVIDIA HGX B300 product page: 36 PFLOP/s sparse over 8
    (r"H[12]00 NVL", 835.5),  # NVIDIA H100 NVL and H200 NVL datasheets: 1671 sparse
    (r"H100 PCIe", 756.5),  # NVIDIA H100 datasheet: 1513 sparse
    (r"L40S", 362.05),  # NVIDIA L40S datasheet
    (r"L40", 181.05),  # NVIDIA L40 datasheet
    (r"L4", 121.0),  # NVIDIA L4 datasheet: 242 sparse
    (r"A10", 125.0),  # NVIDIA A10 datasheet
    (r"RTX 5090", 209.5),  # NVIDIA RTX Blackwell architecture whitepaper, float32 sums
    (r"RTX 4090", 165.2),  # NVIDIA Ada architecture whitepaper, float32 sums
    (r"RTX 3090", 71.0),  # NVIDIA GA102 architecture whitepaper, float32 sums
    (r"MI325X", 1307.4),  # AMD Instinct MI325X datasheet
    (r"MI250X", 191.5),  # AMD Instinct MI250X datasheet: 383 per card, which torch sees as two devices
)
_LESSER = re.compile(r"\b4090 D\b|\b3090 Ti\b")


def peak_flops(device_type: str, device_name: str, dtype: object) -> float | None:
    """Dense peak of one device in FLOP/s; None if unknown, as on a CPU or in another dtype.

    device_name: from `torch.cuda.get_device_name`. dtype: what products compute in, a name or a torch.dtype;
    only bfloat16 and float16 have a peak here.
    """
    if device_type == "cpu" or str(dtype).removeprefix("torch.") not in ("bfloat16", "float16"):
        return None
    from plait.contract.cluster import PART, Cluster

    if re.search(PART, device_name) or _LESSER.search(device_name):
        return None
    if cluster := Cluster.with_device(device_type, device_name):
        return cluster.rate(str(dtype).removeprefix("torch."))
    for pattern, tflops in _OTHERS:
        if re.search(rf"\b(?:{pattern})\b", device_name):
            return tflops * 1e12
    return None
