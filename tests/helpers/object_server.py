"""A real server of S3's protocol on this machine, behind a gate: if that is shut, its clients see it go away."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from tests.helpers.commands import free_port

PROGRAM = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class Gate:
    """Passes connections on to the server. slow: seconds that pass before each request's first part is passed on."""

    def __init__(self, server: int) -> None:
        self._server, self.port, self.slow = server, free_port(), 0.0
        self._open: list[socket.socket] = []
        self._listening: socket.socket | None = None
        self.open()

    def open(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listening,), daemon=True).start()

    def shut(self) -> None:
        """Whoever connects is refused, and every connection breaks."""
        assert self._listening is not None
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listening.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
                self._open += [client, server]
                threading.Thread(target=self._pass, args=(client, server, self), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, None), daemon=True).start()

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket, gate: "Gate | None") -> None:
        with contextlib.suppress(OSError), source, target:
            while data := source.recv(1 << 16):
                if gate is not None and gate.slow and data.startswith(b"PUT"):
                    time.sleep(gate.slow)
                target.sendall(data)


class Server:
    """env: what a command needs to find it. gate: before it. client: boto3's, past the gate."""

    def __init__(self, port: int) -> None:
        import boto3

        self.gate = Gate(port)
        self.env = {
            **{"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.gate.port}", "AWS_DEFAULT_REGION": "us-east-1"},
            **{"AWS_ACCESS_KEY_ID": "some", "AWS_SECRET_ACCESS_KEY": "thing", "AWS_EC2_METADATA_DISABLED": "true"},
            "AWS_MAX_ATTEMPTS": "1",  # of the library itself, which waits in between
        }
        keys = {"aws_access_key_id": "some", "aws_secret_access_key": "thing", "region_name": "us-east-1"}
        self.client: Any = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **keys)
        self.client.create_bucket(Bucket="runs")

    def names(self, prefix: str) -> list[str]:
        """Of the objects below it."""
        listed = self.client.list_objects_v2(Bucket="runs", Prefix=prefix).get("Contents", [])
        return sorted(each["Key"].removeprefix(prefix) for each in listed)

    def waits(self, true: Callable[[], bool], seconds: float = 60.0) -> None:
        """Returns when it is true."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end
            time.sleep(0.02)


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """Inside, this process finds it too."""
    env = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env=env,
    ) as process:  # fmt: skip
        try:
            server = Server(int(process.stdout.readline()))
            with mock.patch.dict(os.environ, server.env):
                yield server
        finally:
            process.stdin.close()
            process.kill()
