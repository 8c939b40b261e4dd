"""Writes stubs.c: a function for each of NVIDIA's that torch's libraries name and the simulated device does not have.

    python stubs.py FOLDER_OF_LIBTORCH_CUDA OUT OBJECTS...

A stub says its name and returns an error, so that a run ends with what is missing instead of a library that does not
load. Beside it `names` is written: by which file names torch's libraries ask for NVIDIA's.
"""

import re
import subprocess
import sys
from pathlib import Path

PREFIXES = "__cuda cuda cublas cudnn cusparse cusolver cufft cuFile curand cupti nccl nvml nvrtc nvshmem cu(?=[A-Z])"
FUNCTION = re.compile(rf"(?:{PREFIXES.replace(' ', '|')})\w+$")
NAMES = re.compile(rb"(?<=\0)(?:cu|nvml)[A-Z]\w{3,60}(?=\0)")  # what a library looks up when it runs
LIBRARY = re.compile(r"NEEDED.*\[(lib(?:cu|nccl|nvrtc|nvshmem|nvJitLink)\S*)\]")
OPENED = ("libcuda.so.1", "libnvidia-ml.so.1")  # by name, while torch runs
TEXTS = re.compile(r"(String|Name)$")

HEAD = """#include <stdio.h>
static int missing(const char *name) {
    fprintf(stderr, "simulated GPU: %s is not simulated\\n", name);
    return 801; /* cudaErrorNotSupported */
}
"""


def printed(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout


def main(torch: Path, out: Path, objects: list[str]) -> None:
    libraries = [str(file) for file in sorted(torch.glob("*.so"))]
    asked = {line.split()[-1].split("@")[0] for line in printed("nm", "-D", "-u", *libraries).splitlines() if line}
    asked |= {name.decode() for name in NAMES.findall((torch / "libc10_cuda.so").read_bytes())}
    made = {line.split()[-1] for line in printed("nm", "--defined-only", *objects).splitlines() if " T " in line}
    rest = sorted(name for name in asked if FUNCTION.match(name) and not {name, f"{name}_v2"} & made)
    lines = [
        f'const char *{name}() {{ return "not simulated"; }}' if TEXTS.search(name) else
        f'int {name}() {{ return missing("{name}"); }}'
        for name in rest
    ]  # fmt: skip
    (out / "stubs.c").write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
    needed = LIBRARY.findall(printed("readelf", "-d", *libraries))
    (out / "names").write_text("\n".join(sorted({*needed, *OPENED})) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
