"""Bytes of a store that stands behind a URL: http, S3, or anything else that fsspec knows.

Enters: a URL of a store's folder, a file name, the byte to begin with. Leaves: the bytes in order,
in pieces, or an error that says whether nobody answered or the file is not there. Costs: one thread
that fetches ahead of whoever writes, and about 70 MB of memory.

Contract: nothing here waits for ever. A server that says nothing for `SILENCE_SECONDS` counts as
gone, whatever the protocol's own idea of time. What arrives is not trusted: the caller holds it
against the manifest.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.errors import InputError, MissingExtraError, StoreError

SILENCE_SECONDS = 30.0
"""How long a server may say nothing before it counts as gone."""
_CONNECT_SECONDS = 10.0
_PIECE_BYTES = 4 << 20
_MOST_PIECES = 8
_QUICK_SECONDS, _SLOW_SECONDS = 0.5, 4.0

# At least two letters, so that no drive of anybody is a scheme; `::` chains as fsspec does.
_SCHEME = re.compile(r"((?:^|::)[A-Za-z][A-Za-z0-9+.-]+):(/+)")
_USER = re.compile(r"://[^/@]+@")


class UnreachableError(StoreError):
    """Nobody answered, or stopped answering; another try may help."""


class AbsentError(StoreError):
    """The server answered that there is no such file."""


def as_url(path: str | Path) -> str | None:
    """Return `path` as a URL when it is one, also after `Path` took a slash from it; else None."""
    text = str(path)
    if not _SCHEME.match(text) or Path(text).exists():
        return None
    if "://" not in text:
        text = _SCHEME.sub(r"\1://", text)
        text = re.sub(r"^(file|local)://", r"\1:///", text)
    return text.removesuffix("/store.json").rstrip("/")


def shown(path: str | Path) -> str:
    """Return a store as people may see it: a URL with its slashes and without a password, or the path."""
    url = as_url(path)
    return str(path) if url is None else Remote(url).name


@dataclass(frozen=True)
class Remote:
    """The folder of a store behind a URL."""

    url: str

    @property
    def name(self) -> str:
        """The URL as it may be shown: without a password."""
        return _USER.sub("://", self.url)

    def read(self, file: str) -> bytes:
        """Return a small file whole."""
        system, root = self._connect()

        def produce() -> Iterator[bytes]:
            yield bytes(system.cat_file(f"{root}/{file}"))

        with self._translated(file), contextlib.closing(_Ahead()) as ahead:
            ahead.start(produce)
            return b"".join(ahead)

    def pieces(self, file: str, start: int, size: int) -> Iterator[bytes]:
        """Yield the bytes of `file` from `start` to `size`, in order.

        A server that cannot begin in the middle is asked for the whole; the pieces then begin at 0
        again, after an empty one that says so.
        """
        system, root = self._connect()
        with self._translated(file), contextlib.closing(_Ahead()) as ahead:
            ahead.start(lambda: _produce(system, f"{root}/{file}", start, size))
            yield from ahead

    def _connect(self) -> tuple[Any, str]:
        """Return fsspec's file system and the folder in it. fsspec keeps one per process."""
        from fsspec.core import url_to_fs

        if self.url.startswith("http") and "?" in self.url:
            raise InputError(
                f"{self.name} has a query.",
                "the address of a folder, to which /store.json can be added",
                "serve the folder itself, or copy it",
            )
        try:
            system, root = url_to_fs(self.url, **_options(self.url))
        except ImportError as error:
            package = "aiohttp" if self.url.startswith("http") else str(error)
            raise MissingExtraError.for_package(
                package, "remote", f"reading {self.name}"
            ) from error
        except ValueError as error:
            raise InputError(
                f"{self.name}: {error}.", "a URL that fsspec knows: http, s3, gs, ...", ""
            ) from error
        except OSError:  # some protocols (ftp, sftp) connect at once
            with self._translated("store.json"):
                raise
        return system, root.rstrip("/")

    @contextlib.contextmanager
    def _translated(self, file: str) -> Iterator[None]:
        """Turn whatever a protocol raises into our two kinds of failure."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            if _is_absent(error):
                raise AbsentError(
                    f"{self.name} has no {file}.",
                    "the address of a folder made by `stoker pack`",
                    f"look at {self.name}/{file}",
                ) from error
            if _is_final(error):
                raise AbsentError(
                    f"{self.name}/{file} is refused: {_words(error)}.",
                    "a file that may be read",
                    "look at the credentials that fsspec uses for this address",
                ) from error
            raise UnreachableError(
                f"{file} cannot be read from {self.name}: {_words(error)}.",
                "a server that answers",
                "look at the server and the network, and try again",
            ) from error


def _options(url: str) -> dict[str, Any]:
    """Bounds for http; the user's own settings of fsspec stay."""
    if not url.startswith(("http://", "https://")):
        return {}
    from aiohttp import ClientTimeout
    from fsspec.config import conf

    own = conf.get(url.partition(":")[0], {})
    timeout = ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
    return {
        "client_kwargs": {"timeout": timeout, **own.get("client_kwargs", {})},
        # Byte 1000 of a compressed answer is not byte 1000 of the file.
        "headers": {**own.get("headers", {}), "Accept-Encoding": "identity"},
    }


def _is_absent(error: BaseException) -> bool:
    missing = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    return missing or getattr(error, "status", None) in (404, 410)


def _is_final(error: BaseException) -> bool:
    """Whether asking again would be answered the same."""
    status = getattr(error, "status", None)
    refused = isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)
    return refused or isinstance(error, PermissionError)


def _words(error: BaseException) -> str:
    text = _USER.sub("://", str(error).strip())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# -- fetching ahead ------------------------------------------------------------------------


def _produce(system: Any, path: str, start: int, size: int) -> Iterator[bytes]:
    if _has_ranges(system, path, size):
        yield from _by_ranges(system, path, start, size)
    else:
        if start:
            yield b""
        yield from _by_stream(system, path, size)


def _has_ranges(system: Any, path: str, size: int) -> bool:
    """Whether the server reads from the middle of a file; `python -m http.server` does not.

    fsspec's own range read would take the whole file and give it for the piece.
    """
    if not path.startswith(("http://", "https://")) or size < 2:
        return True
    try:
        with system.open(path, "rb", block_size=1, cache_type="none", size=size) as file:
            file.seek(1)
            file.read(1)
    except ValueError:
        return False
    return True


def _by_ranges(system: Any, path: str, start: int, size: int) -> Iterator[bytes]:
    """Batches of pieces at once, as many as arrive in about a second."""
    num_pieces = 1
    while start < size:
        ends = [min(start + _PIECE_BYTES * (n + 1), size) for n in range(num_pieces)]
        ends = sorted(set(ends))
        starts = [start, *ends[:-1]]
        began = time.monotonic()
        pieces = system.cat_ranges([path] * len(ends), starts, ends, on_error="raise")
        seconds = time.monotonic() - began
        for low, high, piece in zip(starts, ends, pieces, strict=True):
            if len(piece) != high - low:
                raise EOFError(f"{len(piece)} bytes came instead of {high - low}")
            yield bytes(piece)
        start = ends[-1]
        if seconds < _QUICK_SECONDS:
            num_pieces = min(2 * num_pieces, _MOST_PIECES)
        elif seconds > _SLOW_SECONDS:
            num_pieces = max(1, num_pieces // 2)


def _by_stream(system: Any, path: str, size: int) -> Iterator[bytes]:
    left = size
    with system.open(path, "rb", block_size=0, size=size) as file:
        while left:
            piece = file.read(min(left, _PIECE_BYTES))
            if not piece:
                raise EOFError(f"it ended {left} bytes early")
            left -= len(piece)
            yield bytes(piece)


class _Ahead:
    """Runs a producer in a thread of its own, and gives up on one that has gone silent."""

    def __init__(self) -> None:
        self._items: queue.Queue[bytes | BaseException | None] = queue.Queue(_MOST_PIECES)
        self._closed = threading.Event()

    def start(self, produce: Callable[[], Iterator[bytes]]) -> None:
        # A daemon: a thread that hangs inside a protocol must not keep the process alive.
        threading.Thread(
            target=self._run, args=(produce,), daemon=True, name="stoker-fetch"
        ).start()

    def _run(self, produce: Callable[[], Iterator[bytes]]) -> None:
        try:
            for piece in produce():
                self._put(piece)
                if self._closed.is_set():
                    return
            self._put(None)
        except Exception as error:  # noqa: BLE001  raised again by __iter__
            self._put(error)

    def _put(self, item: bytes | BaseException | None) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._items.put(item, timeout=0.2)
                return

    def __iter__(self) -> Iterator[bytes]:
        while True:
            try:
                item = self._items.get(timeout=SILENCE_SECONDS)
            except queue.Empty:
                raise TimeoutError(f"nothing came for {SILENCE_SECONDS:g} s") from None
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        self._closed.set()
