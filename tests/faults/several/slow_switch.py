"""A switch in user space that delays and loses frames, for kernels without `netem`.

    slow_switch.py DELAY_SECONDS LOST_SHARE PID,ADDRESS...

Gives each machine, the network namespace of PID, a TAP device with ADDRESS in the place of eth0, until its standard
input ends. Prints "ready" when all have one.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
COMMANDS = ("link set eth0 down", "addr flush dev eth0", "link set slow0 mtu 1500 up", "addr add {} dev slow0")


def tap(pid: str, address: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    own, there = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if libc.setns(there, 0):
        raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"slow0", IFF_TAP | IFF_NO_PI))
    for command in COMMANDS:
        subprocess.run(["ip", *command.format(address).split()], check=True)
    libc.setns(own, 0)
    return device


def main(delay: float, lost: float, machines: list[str]) -> None:
    devices = [tap(*machine.split(",")) for machine in machines]
    print("ready", flush=True)
    queue: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        wait = max(queue[0][0] - time.monotonic(), 0) if queue else 1.0
        ready, _, _ = select.select([0, *devices], [], [], wait)
        if 0 in ready:
            return
        for device in ready:
            while True:
                try:
                    frame = os.read(device, 65536)
                except BlockingIOError:
                    break
                count += 1
                if random.random() >= lost:
                    for other in devices:
                        if other != device:
                            heapq.heappush(queue, (time.monotonic() + delay, count, other, frame))
        while queue and queue[0][0] <= time.monotonic():
            _, _, device, frame = heapq.heappop(queue)
            try:
                os.write(device, frame)
            except OSError:  # the machine is gone
                continue


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
