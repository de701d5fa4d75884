"""A store behind a server that lies, for `faults.py`.

Enters: a folder with a store, and one of `REMOTE`. Leaves: whether the samples that came over HTTP are the right ones.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fault_data import rows
from stoker.store import remote_fetch
from stoker.store.reader import open_store


class Lying(http.server.SimpleHTTPRequestHandler):
    """A server with one fault."""

    fault = ""
    asked = 0

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        type(self).asked += 1
        shard, fault = self.path.endswith(".h5"), self.fault
        if fault == "500 for ever" or (fault == "500 twice" and self.asked <= 2):
            return self.send_error(500)
        if fault == "a shard is missing" and shard:
            return self.send_error(404)
        path = Path(self.directory) / self.path.lstrip("/")
        if not path.is_file():
            return self.send_error(404)
        data = bytearray(path.read_bytes())
        if fault == "silence" and shard:
            time.sleep(3600)
        if fault == "a wrong byte" and shard:
            data[len(data) // 2] ^= 1
        begin, end = 0, len(data)
        if wanted := self.headers.get("Range"):
            low, _, high = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(low), min(end, int(high) + 1) if high else end
        part = bytes(data[begin:end])
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        endless = fault == "an endless manifest" and not shard
        if not endless:
            self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if fault == "cut answers" and shard:
            part = part[: len(part) // 2]
        self.wfile.write(part)
        with contextlib.suppress(OSError):
            while endless:
                self.wfile.write(b" " * 65536)
        return None


REMOTE = (
    "500 twice",
    "500 for ever",
    "a wrong byte",
    "cut answers",
    "a shard is missing",
    "an endless manifest",
    "silence",
)


def remote(fault: str, folder: Path) -> dict[str, Any]:
    handler = type("Handler", (Lying,), {"fault": fault, "asked": 0})
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(handler, directory=str(folder))
    )
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["STOKER_CACHE"] = str(folder / "cache")
    remote_fetch.SILENCE_SECONDS = 1.0  # 30 in real life
    with open_store(f"http://127.0.0.1:{server.server_address[1]}/store") as store:
        changed = int(not np.array_equal(store.read_rows("features", 0, store.num_samples), rows()))
    return {"lost": 0, "repeated": 0, "changed": changed}
