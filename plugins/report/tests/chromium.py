"""Chromium without a window and without a network, driven over a pipe by the DevTools protocol."""

import json
import os
import shutil
import subprocess

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chrome-headless-shell", "google-chrome", "chromium-browser")


class Chromium:
    """One page. said: what it wrote to its console, and its uncaught errors."""

    def __init__(self, folder, width, dark):
        """Skips the test if there is no browser."""
        path = next(filter(None, map(shutil.which, NAMES)), None)
        if path is None:
            pytest.skip(f"no headless browser: none of {', '.join(NAMES)}")
        (theirs, self._to), (self._from, answers) = os.pipe(), os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        flags += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={folder}"]
        flags += [f"--window-size={width},5000", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
        command = f'exec "$@" 3<&{theirs} 4>&{answers}'  # the descriptors that it reads and writes
        self._process = subprocess.Popen(
            ["bash", "-c", command, "browser", path, *flags], pass_fds=(theirs, answers), stderr=subprocess.DEVNULL
        )
        os.close(theirs), os.close(answers)
        self._last, self._rest, self._session, self.said = 0, b"", None, []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, address):
        self._call("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && typeof show === 'function'")

    def value(self, expression):
        """What the expression gives, which may be a promise."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression):
        """Waits, at most 60 seconds, until the expression is true."""
        asked = f"""new Promise((done, fail) => {{ setTimeout(fail, 60000, "never: " + {json.dumps(expression)});
            const look = () => ({expression}) ? done(true) : setTimeout(look, 20); look(); }})"""
        assert self.value(asked)

    def key(self, key, code):
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def picture(self):
        """The page as a PNG, in base64."""
        return self._call("Page.captureScreenshot")["data"]

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._to), os.close(self._from)

    def _call(self, method, **arguments):
        self._last += 1
        message = {"id": self._last, "method": method, "params": arguments}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                self.said.append(answer["params"])
            if answer.get("id") == self._last:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _message(self):
        while b"\0" not in self._rest:
            more = os.read(self._from, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
