"""Makes .hosted-device: a folder that makes torch know a device of another package. Needs g++ and ninja.

.venv/bin/python -m tools.hosted_device.build
PYTHONPATH=.hosted-device .venv/bin/plait train 'strategy=[fsdp2]' launch.nproc_per_node=2
"""

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".hosted-device"
# torch imports what stands in this group of entry points.
METADATA = {"METADATA": "Metadata-Version: 2.1\nName: hosted-device\nVersion: 0\n"} | {
    "entry_points.txt": "[torch.backends]\nhosted = hosted_device:begin\n"
}


def main() -> None:
    from torch.utils.cpp_extension import load

    here, work = Path(__file__).parent, FOLDER / "work"
    work.mkdir(parents=True, exist_ok=True)
    sources = [str(here / name) for name in ("device.cpp", "collectives.cpp")]
    load("_hosted_device", sources, build_directory=str(work), extra_cflags=["-O1"], is_python_module=False)
    shutil.copy(work / "_hosted_device.so", FOLDER)
    shutil.copy(here / "hosted_device.py", FOLDER)
    told = FOLDER / "hosted_device-0.dist-info"
    told.mkdir(exist_ok=True)
    for name, text in METADATA.items():
        (told / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
