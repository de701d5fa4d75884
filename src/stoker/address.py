"""Addresses of stores: which ones are URLs, and how to show them without secrets.

Enters: a path or URL that a user typed, or a text that repeats one. Leaves: the URL, or the same text with
`***` where a user, a password, a query or a fragment stood. Costs a few microseconds.

A URL can hold a secret in three places: before the `@` (a password, or a token in the place of the user), behind
the `?` (signatures of presigned URLs), behind the `#`. None of the three is ever shown, logged or stored outside
a file that only its owner reads. Where a URL can be read in two ways, the way that hides more is taken.

`shown` is for one address, `masked` for any text. Passwords with spaces cannot be told from the words around
them, so every address that is met is remembered (`keep_secrets`), and `masked` replaces its parts wherever they
occur.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote

from stoker.strict_json import exact_text

MARK = "***"
"""Replaces a secret."""

HIDDEN_WORDS = "STOKER_WORDS"
"""Environment variable with the words of a command that we start, if they hold secrets: all users can read a
command line, and only its owner the environment of a process."""

# A scheme has at least two letters, so that no drive letter is one; `::` chains addresses as in fsspec.
_NAME = r"[A-Za-z][A-Za-z0-9+.-]+"
_ADDRESS = re.compile(rf"(?:{_NAME}::)*{_NAME}:/+")
_SCHEME = re.compile(rf"((?:^|::){_NAME}):/+")
_LINK = re.compile(rf"::(?={_NAME}:[/:])")
_IN_TEXT = re.compile(
    rf"(?<![A-Za-z0-9+.-])(?:{_NAME}::)*(?:{_NAME}:/|[A-Za-z]://)\S*[^\s)\]}}>'\",.;:!`\\]"
)
_PART = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(:/+)(.*)", re.DOTALL)
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.%]*\]|[^:\[\]@]*)(?::[0-9]*)?")
_FILES = ("file", "local")
# Azure writes `abfs://container@account.dfs.core.windows.net`: the container is no secret.
_AZURE = ("abfs", "abfss", "wasb", "wasbs")
_CONTAINER = re.compile(r"\$?[a-z0-9-]{3,63}@[a-z0-9]+\.(?:dfs|blob)\.core\.windows\.net(?=/|$)")
_LEAST_LETTERS = {"login": 8, "token": 16}
"""Shorter secrets are only replaced beside an `@`: they would also match inside other words."""
_MOST_ADDRESSES = 32


_met: Mapping[str, Mapping[str, str]] = {}
"""Addresses with secrets of this process, the oldest first, each with texts that are never shown and what to show. This
and the next value are replaced as a whole, so threads may read them."""
_secrets: tuple[tuple[str, str], ...] = ()
"""These pairs of all addresses, the longest text first."""


# -- what is a URL -------------------------------------------------------------------------------


def as_url(path: str | Path) -> str | None:
    """Return `path` as a URL if it is one, also after `Path` removed a slash from it; else None."""
    text = str(path)
    # os.path: `Path.exists` raises where a name is too long, and signed URLs are long.
    if not _ADDRESS.match(text) or os.path.exists(text):  # noqa: PTH110
        return None
    if "://" not in text:
        text = _SCHEME.sub(r"\1://", text)
        text = re.sub(r"(^|::)(file|local)://", r"\1\2:///", text)
    keep_secrets(text)
    return text.removesuffix("/store.json").rstrip("/")


def parts(url: str) -> Iterator[tuple[str, str]]:
    """Yield `(scheme, what follows its slashes)` of every address that is chained in `url`."""
    for text in _LINK.split(url):
        if match := _PART.fullmatch(text):
            yield match[1].lower(), match[3]


def host_of(rest: str) -> str:
    """Return the part of an address that names user and host: up to the first `/`, `?` or `#`."""
    return re.split(r"[/?#]", rest, maxsplit=1)[0]


def is_readable(scheme: str, rest: str) -> bool:
    """Return whether an address has only one reading.

    A bare `/`, `?` or `#` in a password ends the host for every library, which then takes the beginning of
    the password for a port and shows it in an error. A bare `@` in the path of a web address may end a password.
    """
    host = host_of(rest)
    if not _HOST.fullmatch(host.rpartition("@")[2]):
        return False
    return not (scheme in ("http", "https") and "@" in rest[len(host) :])


# -- what may be shown ---------------------------------------------------------------------------


def shown(path: str | Path) -> str:
    """Return a path or URL to show: a URL with its slashes and without secrets."""
    url = as_url(path)
    return str(path) if url is None else without_secrets(url)


def without_secrets(url: str) -> str:
    """Return a URL without its secrets."""
    return "::".join(_masked_part(text) for text in _LINK.split(url))


def has_secret(url: str) -> bool:
    """Return whether a URL holds a secret."""
    return without_secrets(url) != url


def masked(text: str) -> str:
    """Return a text without the secrets of the URLs in it."""
    for secret, instead in _secrets:
        if secret in text:
            text = text.replace(secret, instead)
    if ":/" not in text:
        return text
    return _IN_TEXT.sub(lambda match: without_secrets(match[0]), text)


def repeats_secret(error: BaseException) -> bool:
    """Return whether the traceback of an error, its causes included, holds a secret."""
    text = "".join(traceback.format_exception(error))
    return masked(text) != text


def masked_values(value: Any) -> Any:
    """Return plain values, nested in any way, with every text in them masked."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, Mapping):
        return {masked_values(key): masked_values(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        entries = [masked_values(entry) for entry in value]
        return entries if isinstance(value, list) else tuple(entries)
    return value


def _masked_part(text: str) -> str:
    match = _PART.fullmatch(text)
    if match is None:  # `simplecache` of `simplecache::http://host/x`
        return text if re.fullmatch(rf"{_NAME}|", text) else MARK
    scheme, slashes, rest = match[1].lower(), match[2], match[3]
    if scheme in _FILES and slashes != "://":  # a path, which may hold any letter
        return text
    user, at, place = rest.rpartition("@")
    if re.search(r"[?#]", user):  # an @ in a query, or a ? in a password: it cannot be decided
        return f"{match[1]}{slashes}{MARK}"
    if at and not (scheme in _AZURE and _CONTAINER.match(rest)):
        user = MARK
    if not _HOST.fullmatch(host_of(place)):  # the beginning of a password, taken for a port
        return f"{match[1]}{slashes}{MARK}"
    place = re.sub(r"([?#]).+", rf"\1{MARK}", place, count=1, flags=re.DOTALL)
    return f"{match[1]}{slashes}{user}{at}{place}"


def slow_digest(text: str) -> str:
    """Return a digest of 16 hexadecimal letters of a text with secrets, for names that others may see.

    Slow on purpose, about 50 ms and 16 MB, so that nobody can find a password by trying many.
    """
    return hashlib.scrypt(
        text.encode(errors="surrogatepass"), salt=b"stoker", n=2**14, r=8, p=1
    ).hex()[:16]


# -- what was met --------------------------------------------------------------------------------


def keep_secrets(text: str) -> None:
    """Remember the secrets of the address that `text` is or ends with, such as `--store=URL`.

    Not for prose: everything after the scheme is taken for the address.
    """
    global _met, _secrets  # noqa: PLW0603
    match = _ADDRESS.search(text)
    if match is None or text in _met or not has_secret(text[match.start() :]):
        return
    found: dict[str, str] = {}
    for scheme, rest in parts(text[match.start() :]):
        if not (scheme in _AZURE and _CONTAINER.match(rest)):
            for secret, instead in _secrets_of(rest):
                found.update(dict.fromkeys(_forms(secret), instead))
    newest = list(_met.items())[1 - _MOST_ADDRESSES :]
    _met = {**dict(newest), text: found}
    known = {secret: instead for each in _met.values() for secret, instead in each.items()}
    _secrets = tuple(sorted(known.items(), key=lambda pair: -len(pair[0])))


def _secrets_of(rest: str) -> Iterator[tuple[str, str]]:
    """Yield the secret texts of an address, each with what to show in its place."""
    user, at, place = rest.rpartition("@")
    if re.search(r"[?#]", user):
        yield rest, MARK
        yield from _beginnings(f"{rest}/", ":/", "://")
        place = rest
    elif at:
        _, colon, password = user.partition(":")
        before = "" if colon or len(user) >= _LEAST_LETTERS["login"] else "/"
        yield f"{before}{user}@", f"{before}{MARK}@"
        yield from _beginnings(user, ":/", "://")
        if password:
            yield f":{password}@", f":{MARK}@"
        if len(user) >= _LEAST_LETTERS["login" if colon else "token"]:
            yield user, MARK
        login = unquote(user) + ("" if colon else ":")
        for encoding in ("utf-8", "latin-1"):  # what headers of a basic login hold
            yield base64.b64encode(login.encode(encoding, "replace")).decode(), MARK
    if query := re.search(r"([?#]).+", place, re.DOTALL):
        yield query[0], f"{query[1]}{MARK}"
        yield from _beginnings(query[0][1:], query[1])
        for value in re.split(r"[?#&=;]", query[0]):
            if len(value) >= _LEAST_LETTERS["token"]:
                yield value, MARK


def _beginnings(text: str, *before: str) -> Iterator[tuple[str, str]]:
    """Yield the beginnings that `Path.parent` leaves of a secret with slashes, after each text of `before`."""
    pieces = re.split("/+", text)
    for number in range(1, len(pieces)):
        for mark in before:
            yield f"{mark}{'/'.join(pieces[:number])}", f"{mark}{MARK}"


def _forms(secret: str) -> set[str]:
    """Return a secret as libraries and messages write it: quoted or not, escaped, as `Path` leaves it."""
    end = "@" if secret.endswith("@") else ""
    plain = unquote(secret)
    bare = plain.removesuffix(end)
    encoded = {
        quote(bare, safe, errors="surrogatepass") + end for safe in ("", ":", ":@/!$&'()*+,;=~")
    }
    forms = {secret, plain, str(PurePosixPath(secret)), str(PurePosixPath(plain)), *encoded}
    forms |= {repr(form)[1:-1] for form in forms} | {exact_text(form)[1:-1] for form in forms}
    return {form for form in forms if len(form) > 1}
