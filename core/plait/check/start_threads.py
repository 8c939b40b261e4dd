"""Starts COUNT threads, and exits with how many could be started: `python start_threads.py COUNT`, at most 255."""

import os
import sys
import threading


def started(count: int) -> int:
    for number in range(count):
        try:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        except RuntimeError:
            return number
    return count


if __name__ == "__main__":
    os._exit(started(int(sys.argv[1])))
