"""A store behind a server that lies, for `faults.py`.

Enters: a folder with a store, and one of `REMOTE`. Leaves: whether the samples that came over HTTP are the right ones.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import resource
import threading
import time
import zlib
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fault_data import rows
from stoker.store import remote_fetch
from stoker.store.reader import open_store


class Lying(http.server.SimpleHTTPRequestHandler):
    """A server with one fault."""

    fault = ""
    asked = 0
    lied: ClassVar[set[str]] = set()

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        type(self).asked += 1
        shard, fault = self.path.endswith(".h5"), self.fault
        if fault == "500 for ever" or (fault == "500 twice" and self.asked <= 2):
            return self.send_error(500)
        if fault == "a shard is missing" and shard:
            return self.send_error(404)
        if fault == "a redirect to itself":
            self.send_response(302)
            self.send_header("Location", self.path)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        path = Path(self.directory) / self.path.lstrip("/")
        if fault == "another shard in its place" and shard:
            path = sorted(path.parent.glob("*.h5"))[-1]
        if not path.is_file():
            return self.send_error(404)
        data = bytearray(path.read_bytes())
        if fault == "a login page with status 200":
            data = bytearray(b"<html><body>Please log in</body></html>")
        if fault == "silence" and shard:
            time.sleep(3600)
        if fault == "a wrong byte" and shard:
            data[len(data) // 2] ^= 1
        if fault == "a wrong byte, once" and shard and self.lies_once():
            data[len(data) // 2] ^= 1
        if fault == "a gzip of 1 GiB as manifest" and not shard:
            data = bytearray(_bomb())
        begin, end = 0, len(data)
        wanted = None if fault == "ranges are ignored" else self.headers.get("Range")
        if wanted:
            low, _, high = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(low), min(end, int(high) + 1) if high else end
        part = bytes(data[begin:end])
        if fault == "more than was asked for" and shard:
            part += bytes(4096)
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        if fault == "a gzip of 1 GiB as manifest" and not shard:
            self.send_header("Content-Encoding", "gzip")
        endless = fault == "an endless manifest" and not shard
        if not endless:
            self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        cut_once = fault in ("answers cut once", "ranges are ignored")
        if shard and (fault == "cut answers" or (cut_once and self.lies_once())):
            part = part[: len(part) // 2]
        self.wfile.write(part)
        with contextlib.suppress(OSError):
            while endless:
                self.wfile.write(b" " * 65536)
        return None

    def lies_once(self) -> bool:
        """Whether a file is asked for, with more than its first bytes, for the first time."""
        small = self.headers.get("Range") == "bytes=0-0"
        first = not small and self.path not in self.lied
        self.lied.add(self.path)
        return first


def _bomb() -> bytes:
    """Return 1 MiB of gzip that unpacks to 1 GiB of blanks; its end does not matter."""
    packer = zlib.compressobj(9, wbits=31)
    block = b" " * (1 << 20)
    first = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    return first + 1023 * again


REMOTE = (
    "500 twice",
    "500 for ever",
    "a wrong byte",
    "cut answers",
    "a shard is missing",
    "an endless manifest",
    "silence",
    "answers cut once",
    "a wrong byte, once",
    "ranges are ignored",
    "more than was asked for",
    "another shard in its place",
    "a login page with status 200",
    "a redirect to itself",
    "a gzip of 1 GiB as manifest",
)


def remote(fault: str, folder: Path) -> dict[str, Any]:
    handler = type("Handler", (Lying,), {"fault": fault, "asked": 0, "lied": set()})
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(handler, directory=str(folder))
    )
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["STOKER_CACHE"] = str(folder / "cache")
    remote_fetch.SILENCE_SECONDS = 1.0  # 30 in real life
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with open_store(f"http://127.0.0.1:{server.server_address[1]}/store") as store:
            found = store.read_rows("features", 0, store.num_samples)
            changed = int(not np.array_equal(found, rows()))
    finally:
        # This process is the server, too. A manifest may have 64 MiB.
        if (grown := resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) > 400 << 10:
            raise RuntimeError(f"it took {grown >> 10} MiB of memory")
    return {"lost": 0, "repeated": 0, "changed": changed}
