"""Bytes of a store that stands behind a URL: http, S3, or anything else that fsspec knows.

Enters: a URL of a store's folder, a file name, the byte to begin with. Leaves: the bytes in order,
in pieces, or an error that says whether the server is silent or has no such file. Costs: one thread
that fetches ahead of the writer, and about 70 MB of memory.

Contract: nothing here waits for ever. A server that sends nothing for `SILENCE_SECONDS` counts as
gone, whatever the protocol's own limits. The time counts from the last byte, so a slow link that keeps sending is not
silent. A manifest that does not end is refused at `bounds.MANIFEST`. What arrives is not trusted: the caller
compares it with the manifest.
"""

from __future__ import annotations

import base64
import contextlib
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import unquote

from stoker.address import MARK, host_of, is_readable, parts, repeats_secret, without_secrets
from stoker.bounds import MANIFEST, read_within
from stoker.display import command
from stoker.errors import CorruptError, InputError, MissingExtraError, StoreError

SILENCE_SECONDS = 30.0  # how long a server may be silent before it counts as gone
_CONNECT_SECONDS = 10.0
_PIECE_BYTES = 4 << 20
_SMALL_PIECE_BYTES = 64 << 10  # size of the first requests, until the speed of the link is known
_MOST_PIECES = 8
_QUICK_SECONDS, _SLOW_SECONDS = 0.5, 4.0

_ENCODE = (
    'python3 -c "from getpass import getpass; from urllib.parse import quote; '
    "print(quote(getpass(), safe=''))\""
)
"""Prints a password as it is written in a URL."""


class UnreachableError(StoreError):
    """The server did not answer, or stopped answering; a retry may help."""


class AbsentError(StoreError):
    """The server answered that there is no such file."""


@dataclass(frozen=True)
class Remote:
    """The folder of a store behind a URL."""

    url: str = field(repr=False)  # with its password, if any; never shown

    @property
    def name(self) -> str:
        """The URL as it may be shown: without a password."""
        return without_secrets(self.url)

    def read(self, file: str) -> bytes:
        """Return a small file whole; one that exceeds the bound of a manifest is refused in the middle."""
        system, root = self._connect()

        def produce() -> Iterator[bytes]:
            path = f"{root}/{file}"
            options = {"block_size": 0, "size": 1} if _is_http(system) else {}
            with system.open(path, "rb", **options) as stream:  # as bytes come, whatever the size
                while piece := stream.read(_SMALL_PIECE_BYTES):
                    yield bytes(piece)

        with self._translated(file), contextlib.closing(_Ahead(produce)) as ahead:
            what, fix = f"{self.name}/{file}", "look at what the server sends"
            return read_within(MANIFEST, iter(ahead), what, fix, CorruptError)

    def pieces(self, file: str, start: int, size: int) -> Iterator[bytes]:
        """Yield the bytes of `file` from `start` to `size`, in order.

        A server that cannot begin in the middle is asked for the whole; the pieces then begin at 0
        again, after an empty one that says so.
        """
        system, root = self._connect()
        produce = partial(_produce, system, f"{root}/{file}", start, size)
        with self._translated(file), contextlib.closing(_Ahead(produce)) as ahead:
            yield from ahead

    def _connect(self) -> tuple[Any, str]:
        """Return fsspec's file system and the folder in it. fsspec keeps one per process."""
        from fsspec.core import url_to_fs

        self._check()
        url, login = _split_login(self.url)
        try:
            system, root = url_to_fs(url, **_options(url, login))
        except ImportError as error:
            what = f"reading {self.name}"
            # fsspec's own error is a sentence; the one that it was raised from names the module.
            module = getattr(error.__cause__, "name", None) or "aiohttp"
            if module == "aiohttp":
                raise MissingExtraError.for_package(module, "remote", what) from error
            raise MissingExtraError(
                f"{what} needs the package {module!r}, which is not installed.",
                "an environment with the package that fsspec uses for this protocol",
                command("pip", "install", module),
            ) from error
        except ValueError as error:
            raise InputError(
                f"{self.name}: {error}.", "a URL that fsspec knows: http, s3, gs, ..."
            ) from _cause(error)
        except OSError:  # some protocols (ftp, sftp) connect at once
            with self._translated("store.json"):
                raise
        return system, root.rstrip("/")

    def _check(self) -> None:
        """Refuse an address that cannot work, or that a library would read in another way than its user."""
        for scheme, rest in parts(self.url):
            if MARK in host_of(rest) or rest.endswith((f"?{MARK}", f"#{MARK}")):
                raise InputError(
                    f"{self.name} is an address as it was shown: its password was left out.",
                    "the address with its password",
                    "write user:password in the place of the stars, or neither stars nor @ where the password is "
                    "kept outside the address (docs/remote.md)",
                )
            if not is_readable(scheme, rest):
                raise InputError(
                    f"{self.name} can be read in two ways.",
                    "user:password@host/store, where / ? # @ : in the password and @ in the path are written "
                    "%2F %3F %23 %40 %3A and %40",
                    f"{_ENCODE}, which prints a password as it is to be written",
                )
        query = re.search(r"[?#]", self.url)
        if self.url.startswith("http") and query is not None:
            raise InputError(
                f"{self.name} has a {'query' if query[0] == '?' else 'fragment'}.",
                "the address of a folder, to which /store.json can be added",
                "serve the folder itself, or copy it",
            )

    @contextlib.contextmanager
    def _translated(self, file: str) -> Iterator[None]:
        """Turn any exception of a protocol into `AbsentError` or `UnreachableError`."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001  raised again as ours
            missing = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
            status = getattr(error, "status", None)
            if missing or status in (404, 410):
                raise AbsentError(
                    f"{self.name} has no {file}.",
                    "the address of a folder made by `stoker pack`",
                    f"look at {self.name}/{file}",
                ) from _cause(error)
            # Asking again would be answered the same.
            refused = isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)
            if refused or isinstance(error, PermissionError):
                raise AbsentError(
                    f"{self.name}/{file} is refused: {_words(error)}.",
                    "a file that may be read",
                    "look at the credentials that fsspec uses for this address",
                ) from _cause(error)
            raise UnreachableError(
                f"{file} cannot be read from {self.name}: {_words(error)}.",
                "a server that answers",
                "look at the server and the network, and try again",
            ) from _cause(error)


def _split_login(url: str) -> tuple[str, str]:
    """Return a web address without its login, and the login; other addresses stay as they are.

    A library that does not get the login cannot repeat it in its messages.
    """
    scheme, colon, rest = url.partition("://")
    if not colon or scheme.lower() not in ("http", "https"):
        return url, ""
    login, _, host = host_of(rest).rpartition("@")
    return f"{scheme}://{host}{rest[len(host_of(rest)) :]}", login


def _options(url: str, login: str) -> dict[str, Any]:
    """Bounds and login for http; the user's own settings of fsspec stay."""
    if not url.startswith(("http://", "https://")):
        return {}
    from aiohttp import ClientTimeout
    from fsspec.config import conf

    # fsspec has one file system for both, and reads the settings of both.
    own = {**conf.get("http", {}), **conf.get("https", {})}
    headers = {**own.get("headers", {}), **_login_header(login)}
    timeout = ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
    return {
        "client_kwargs": {"timeout": timeout, **own.get("client_kwargs", {})},
        # Byte 1000 of a compressed answer is not byte 1000 of the file.
        "headers": {**headers, "Accept-Encoding": "identity"},
    }


def _login_header(login: str) -> dict[str, str]:
    """Return the header of a basic login; aiohttp does not follow a redirect to another host with it."""
    if not login:
        return {}
    user, _, password = login.partition(":")
    text = f"{unquote(user)}:{unquote(password)}".encode(errors="surrogatepass")
    return {"Authorization": f"Basic {base64.b64encode(text).decode()}"}


def _cause(error: BaseException) -> BaseException | None:
    """Return the exception to name as the cause, or None if its text would show a password."""
    return None if repeats_secret(error) else error


def _words(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# -- fetching ahead ------------------------------------------------------------------------


def _produce(system: Any, path: str, start: int, size: int) -> Iterator[bytes]:
    if _has_ranges(system, path, size):
        yield from _by_ranges(system, path, start, size)
    else:
        if start:
            yield b""
        yield from _as_stream(system, path, size, size)


def _has_ranges(system: Any, path: str, size: int) -> bool:
    """Whether the server reads from the middle of a file; `python -m http.server` does not.

    fsspec's own range read would fetch the whole file and return it as the piece.
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


def _is_http(system: Any) -> bool:
    """Whether fsspec speaks http to the server itself, without a cache in between."""
    return type(system).__name__ == "HTTPFileSystem"


def _by_ranges(system: Any, path: str, start: int, size: int) -> Iterator[bytes]:
    """Many pieces at once on a fast link; on a slow one, bytes as they come.

    A request for a whole piece says nothing until the piece is there: at 100 kB/s, 4 MB look like a server
    that has gone silent for 40 s. So every fetch begins as a stream, and goes over to requests for
    many pieces only once the link has shown that they take about a second.
    """
    num_bytes = _SMALL_PIECE_BYTES
    while start < size:
        began = time.monotonic()
        stop = min(start + num_bytes, size)
        if _is_http(system) and num_bytes <= _PIECE_BYTES:
            headers = {**system.kwargs.get("headers", {}), "Range": f"bytes={start}-{stop - 1}"}
            yield from _as_stream(system, path, stop - start, size, headers=headers)
        else:
            yield from _range_at_once(system, path, start, stop)
        seconds = time.monotonic() - began
        start = stop
        if seconds < _QUICK_SECONDS:
            num_bytes = min(2 * num_bytes, _MOST_PIECES * _PIECE_BYTES)
        elif seconds > _SLOW_SECONDS:
            num_bytes = max(_SMALL_PIECE_BYTES, num_bytes // 2)


def _as_stream(
    system: Any, path: str, num_bytes: int, size: int, **options: Any
) -> Iterator[bytes]:
    left = num_bytes
    with system.open(path, "rb", block_size=0, size=size, **options) as file:
        while left:
            piece = file.read(min(left, _PIECE_BYTES))
            if not piece or len(piece) > left:
                raise EOFError(f"{num_bytes - left} bytes came instead of {num_bytes}")
            left -= len(piece)
            yield bytes(piece)


def _range_at_once(system: Any, path: str, start: int, stop: int) -> Iterator[bytes]:
    starts = list(range(start, stop, _PIECE_BYTES))
    ends = [*starts[1:], stop]
    pieces = system.cat_ranges([path] * len(ends), starts, ends, on_error="raise")
    for low, high, piece in zip(starts, ends, pieces, strict=True):
        if len(piece) != high - low:
            raise EOFError(f"{len(piece)} bytes came instead of {high - low}")
        yield bytes(piece)


class _Ahead:
    """Runs a producer in a thread of its own, a few pieces ahead of the consumer.

    Success: the consumer gets every piece in order, then the end. Failure: an error of the producer is raised in
    the consumer, behind the pieces that came before it; silence for `SILENCE_SECONDS` is a `TimeoutError`.
    Cancel: after `close` the producer ends with its next piece; one that hangs inside a protocol is left behind as
    a daemon thread, which ends with the process.
    """

    def __init__(self, produce: Callable[[], Iterator[bytes]]) -> None:
        self._items: queue.Queue[bytes | BaseException | None] = queue.Queue(_MOST_PIECES)
        self._closed = threading.Event()
        run = partial(self._run, produce)
        threading.Thread(target=run, daemon=True, name="stoker-fetch").start()

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
