"""Stores behind a URL, against a real server that stumbles on purpose."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from stoker import address, ownership
from stoker.bounds import Bound
from stoker.cli.main import app
from stoker.errors import CorruptError, InputError, StoreError
from stoker.store import remote, remote_cache, remote_fetch
from stoker.store.reader import open_store
from store_makers import simple_shard, write_store

pytest.importorskip("aiohttp")

NUM_SHARDS = 3


class Server(ThreadingHTTPServer):
    """Serves a folder, with ranges, and with the faults a test asks for.

    Attributes:
        ranges: Whether byte ranges are honoured.
        dies_after: Bytes of a shard after which connections break; None is never.
        deaths_left: How often that happens.
        spoiled: Name of the file whose byte 5000 is sent wrong.
        silent: Requests are taken and never answered.
        sent: Bytes sent, by file.
        pause: Seconds before every 4 kB of a shard.
        endless: Answers do not end.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.ranges = True
        self.dies_after: int | None = None
        self.deaths_left = 0
        self.spoiled = ""
        self.silent = threading.Event()
        self.sent: dict[str, int] = {}
        self.counting = threading.Lock()
        self.status = 0
        self.pause = 0.0
        self.endless = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/store"

    def handle_error(self, request, client_address) -> None:
        """A reader that hangs up is not news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *words) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        while server.silent.is_set():
            time.sleep(0.05)
        path = server.folder / self.path.removeprefix("/store/")
        if server.status or not path.is_file():
            self.send_error(server.status or 404)
            return
        data = bytearray(path.read_bytes())
        if path.name == server.spoiled:
            data[5000] ^= 0xFF
        low, high = 0, len(data)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if server.endless:
            self.send_response(200)
        elif wanted and server.ranges:
            low, high = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
            if low >= len(data):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {low}-{high - 1}/{len(data)}")
        else:
            self.send_response(200)
        if not server.endless:
            self.send_header("Content-Length", str(high - low))
        self.end_headers()
        while server.endless:
            self.send(path.name, bytearray(1 << 16))
        self.send(path.name, data[low:high])

    def send(self, name: str, data: bytearray) -> None:
        server = self.server
        for start in range(0, len(data), 4096):
            piece = data[start : start + 4096]
            with server.counting:
                sent = server.sent.get(name, 0)
                dies = server.deaths_left and name.endswith(".h5") and sent >= server.dies_after
                server.deaths_left -= 1 if dies else 0
                server.sent[name] = 0 if dies else sent + len(piece)
            if dies:
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if name.endswith(".h5"):
                time.sleep(server.pause)
            self.wfile.write(piece)


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "store"
    rng = np.random.default_rng(0)
    write_store(folder, [simple_shard(rng, 300) for _ in range(NUM_SHARDS)]).close()
    return folder


@pytest.fixture
def served(packed, tmp_path):
    folder = tmp_path / "served"
    shutil.copytree(packed, folder)
    server = Server(folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(60)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("STOKER_CACHE_LIMIT", raising=False)
    monkeypatch.setattr(remote, "_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(remote_fetch, "_PIECE_BYTES", 16 << 10)
    return tmp_path / "cache"


def read_all(store) -> dict[str, np.ndarray]:
    num = store.num_samples
    found = {name: store.read_rows(name, 0, num) for name in ("features", "targets")}
    for name in ("peaks", "name"):
        found[name], found[f"{name}/offsets"] = store.read_ragged(name, 0, num)
    found["M1"] = np.stack([store.read_window("M1", index) for index in range(0, num, 50)])
    return found


def assert_same(one, other) -> None:
    expected = read_all(other)
    for name, values in read_all(one).items():
        np.testing.assert_array_equal(values, expected[name])


def copies(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("*/*/*.h5"))


def parts(cache: Path) -> list[Path]:
    return list(cache.glob("*/*/*.part"))


def shard_sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.glob("*.h5")}


# -- reading -------------------------------------------------------------------------------


@pytest.mark.parametrize("ranges", [True, False])
def test_a_url_reads_like_the_folder_and_every_shard_travels_once(served, packed, cache, ranges):
    served.ranges = ranges  # `python -m http.server` has none
    with open_store(served.url) as store, open_store(packed) as local:
        assert copies(cache) == []  # opening reads the manifest only
        assert store.manifest == local.manifest
        store.read_rows("features", 0, 10)
        assert copies(cache) == ["shard-00000.h5"]
        assert_same(store, local)
    with open_store(served.url + "/") as store:
        assert store.verify().problems == ()
    assert parts(cache) == []
    assert len(copies(cache)) == NUM_SHARDS
    for name, size in shard_sizes(packed).items():
        # One whole copy, and the byte that asks for ranges; without them it brings the file too.
        assert size < served.sent[name] <= (size + 1 if ranges else 2 * size)


def test_a_copy_is_on_the_disk_before_it_gets_its_name(served, packed, monkeypatch):
    """Else a machine that loses its power may keep the name, the size and no content."""
    done, rename = [], ownership.rename_over
    monkeypatch.setattr(os, "fsync", lambda part: done.append(os.fstat(part).st_ino))

    def renamed(part, whole, *words):
        assert part.stat().st_ino in done, whole
        rename(part, whole, *words)

    monkeypatch.setattr(ownership, "rename_over", renamed)
    with open_store(served.url) as store, open_store(packed) as local:
        assert_same(store, local)
    assert len({*done}) >= NUM_SHARDS


def test_a_copy_that_is_cut_short_is_none_and_is_closed(tmp_path, monkeypatch):
    (tmp_path / "shard").write_bytes(b"half")
    opened, real = [], os.open
    monkeypatch.setattr(os, "open", lambda *words: opened.append(real(*words)) or opened[-1])
    assert remote_cache.open_copy(tmp_path / "shard", 8) is None
    assert len(opened) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_a_store_crosses_to_another_process_without_asking_again(served, packed):
    with open_store(served.url) as store, open_store(packed) as local:
        before = served.sent["store.json"]
        with pickle.loads(pickle.dumps(store)) as crossed:
            assert_same(crossed, local)
        assert served.sent["store.json"] == before


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_other_protocols_of_fsspec(packed, cache, scheme):
    fsspec = pytest.importorskip("fsspec")
    url = f"file://{packed}"
    if scheme == "memory":
        url = "memory://bucket/store"
        fsspec.filesystem("memory").put(str(packed), "/bucket/store", recursive=True)
    with open_store(url) as store, open_store(packed) as local:
        assert store.path.is_relative_to(cache)
        assert_same(store, local)


def test_verbs_take_a_url_though_their_arguments_are_paths(served, cache):
    done = CliRunner().invoke(app, ["verify", served.url])
    assert done.exit_code == 0, done.output
    assert "sound: checksums verified" in done.output
    done = CliRunner().invoke(app, ["inspect", "--json", served.url])
    document = json.loads(done.output)
    assert (document["refused"], document["path"]) == (False, served.url)
    for words in (["verify", served.url], ["inspect", served.url], ["plan", served.url]):
        said = CliRunner().invoke(app, words).output
        assert said.lstrip().startswith(served.url), said
        lines = [line for line in said.splitlines() if "a copy of" not in line]
        assert str(cache) not in " ".join(lines)
    plan = CliRunner().invoke(app, ["plan", "--json", served.url])
    assert json.loads(plan.output)["store"] == served.url


def test_a_store_is_called_by_its_url_without_the_password(served, packed):
    with open_store(served.url) as store:
        assert store.name == address.shown(Path(served.url)) == served.url
        with pickle.loads(pickle.dumps(store)) as again:
            assert again.name == served.url
    assert address.shown("http://ann:secret@host/store") == "http://***@host/store"
    with open_store(packed) as store:
        assert store.name == address.shown(packed) == str(packed)


@given(
    st.sampled_from(["http", "https", "s3", "gs", "abfs", "sftp"]),
    st.lists(st.from_regex(r"[a-z0-9_.-]*[a-z0-9_-]", fullmatch=True), min_size=1, max_size=4),
)
def test_a_url_survives_being_a_path(scheme, words):
    url = f"{scheme}://{'/'.join(words)}"
    assert address.as_url(url) == url
    assert address.as_url(Path(url)) == url
    assert address.as_url(f"{url}/store.json") == url


@pytest.mark.parametrize(
    ("path", "url"),
    [
        (Path("file:///data/store"), "file:///data/store"),
        (Path("zip://a/b::https://host/x.zip"), "zip://a/b::https://host/x.zip"),
        ("http://host/store/", "http://host/store"),
        (Path("simplecache::http://host/x"), "simplecache::http://host/x"),
        ("filecache::s3://bucket/x", "filecache::s3://bucket/x"),
        ("https://host/x?" + "s" * 5000, "https://host/x?" + "s" * 5000),
        ("stores/train", None),
        ("/data/http:/x", None),
        ("C:/store", None),
        ("store:1", None),
    ],
)
def test_what_is_a_url(path, url):
    assert address.as_url(path) == url


def test_a_folder_that_looks_like_a_url_is_a_folder(packed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(packed, tmp_path / "http:" / "store")
    with open_store("http:/store") as store:
        assert store.path == tmp_path / "http:" / "store"


def test_a_run_finds_the_url_that_it_was_trained_from(served, tmp_path, monkeypatch):
    from stoker.recipes.inference import LOG_NAME, find_training_store
    from stoker.report import Note, RunLog, Topic

    monkeypatch.setattr(remote, "_PAUSE_SECONDS", 0.01)
    nobody = "http://127.0.0.1:1/store"
    for folder, place in (("here", served.url), ("gone", nobody)):
        with RunLog(tmp_path / folder / LOG_NAME) as log:
            log.write("note", Note("data", Topic.STORE, {"store": place}).to_json())
    with RunLog(tmp_path / "older" / LOG_NAME) as log:
        log.write("note", {"text": f"store: {served.url}"})
    for folder in ("here", "older"):
        assert find_training_store(tmp_path / folder / "best.pt") == served.url
    assert find_training_store(tmp_path / "gone" / "best.pt") is None


# -- servers that stumble ------------------------------------------------------------------


@pytest.mark.parametrize("ranges", [True, False])
def test_a_server_that_dies_a_few_times_is_asked_again(served, packed, ranges):
    served.ranges, served.dies_after, served.deaths_left = ranges, 40_000, 3
    with open_store(served.url) as store, open_store(packed) as local:
        assert_same(store, local)
    assert served.deaths_left == 0


def test_a_server_that_keeps_dying_is_an_error_and_the_same_command_goes_on(served, packed, cache):
    with open_store(served.url) as store:
        served.dies_after, served.deaths_left = 0, 10**6
        began = time.monotonic()
        with pytest.raises(StoreError, match=r"shard-00000.h5 cannot be read from http") as caught:
            store.read_rows("features", 0, 10)
        assert time.monotonic() - began < 20
        assert caught.value.fix == "the same command goes on from there"
        assert copies(cache) == []
        served.deaths_left = 0
        with open_store(packed) as local:
            assert_same(store, local)


def test_an_interrupted_copy_is_resumed_where_it_ended(served, packed, cache):
    with open_store(served.url) as store:
        info = store.manifest.shards[0]
        half = (packed / info.file).read_bytes()[: info.size_bytes // 2]
        remote_cache.part_of(store.path / info.file, info.size_bytes).write_bytes(half)
        store.read_rows("features", 0, 10)
    assert served.sent[info.file] == info.size_bytes - len(half) + 1
    assert (store.path / info.file).read_bytes() == (packed / info.file).read_bytes()


def test_leftovers_of_something_else_are_thrown_away(served, packed, cache):
    with open_store(served.url) as store, open_store(packed) as local:
        info = store.manifest.shards[0]
        part = remote_cache.part_of(store.path / info.file, info.size_bytes)
        part.write_bytes(b"x" * (info.size_bytes // 2))
        assert_same(store, local)
    assert parts(cache) == []


def test_a_wrong_byte_is_found_and_nothing_of_it_is_kept(served, cache):
    served.spoiled = "shard-00001.h5"
    with open_store(served.url) as store:
        store.read_rows("features", 0, 10)
        with pytest.raises(CorruptError, match=r"shard-00001\.h5 is damaged; it was fetched twice"):
            store.read_rows("features", 300, 310)
        assert copies(cache) == ["shard-00000.h5"]
        assert parts(cache) == []
        served.spoiled = ""
        store.read_rows("features", 300, 310)  # mended on the server: nothing to clear here


def test_a_cut_copy_in_the_cache_is_fetched_again(served, packed, cache):
    with open_store(served.url) as store:
        store.read_rows("features", 0, 10)
    os.truncate(next(cache.glob("*/*/*.h5")), 1000)
    with open_store(served.url) as store, open_store(packed) as local:
        assert_same(store, local)


def test_a_server_that_says_nothing_is_given_up(served, monkeypatch):
    monkeypatch.setattr(remote_fetch, "SILENCE_SECONDS", 0.3)
    with open_store(served.url) as store:
        served.silent.set()
        began = time.monotonic()
        with pytest.raises(StoreError, match="cannot be read from http"):
            store.read_rows("features", 0, 10)
        assert time.monotonic() - began < 20
        served.silent.clear()


# -- slow links and endless answers --------------------------------------------------------


def test_a_slow_steady_link_is_not_silence(served, packed, monkeypatch):
    """Each answer takes far longer than the silence that is borne, but bytes keep coming."""
    monkeypatch.setattr(remote_fetch, "SILENCE_SECONDS", 2.0)
    monkeypatch.setattr(remote_fetch, "_SMALL_PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(remote_fetch, "_PIECE_BYTES", 1 << 20)
    served.pause = 0.25
    with open_store(served.url) as store, open_store(packed) as local:
        began = time.monotonic()
        assert (store.read_rows("features", 0, 300) == local.read_rows("features", 0, 300)).all()
        assert time.monotonic() - began > 2.0  # else the link was not slow
        served.pause = 1.0
        monkeypatch.setattr(remote_fetch, "SILENCE_SECONDS", 0.4)
        with pytest.raises(StoreError, match=r"nothing came for 0\.4 s|Timeout"):
            store.read_rows("features", 300, 310)


def test_a_manifest_without_end_is_refused_at_its_bound(served, monkeypatch):
    small = Bound("a store.json", 1 << 20)
    monkeypatch.setattr(remote_fetch, "MANIFEST", small)
    served.endless = True
    with pytest.raises(CorruptError, match=r"store\.json has 1\.\d+ MiB or more"):
        open_store(served.url)
    assert served.sent["store.json"] < 64 << 20
    result = CliRunner().invoke(app, ["verify", served.url])
    assert result.exception.exit_code == 2


@pytest.mark.parametrize(
    ("quick", "most"), [(True, 8 * (16 << 10)), (False, 2 * (8 << 10))], ids=["fast", "slow"]
)
def test_the_size_of_requests_follows_the_speed_of_the_link(monkeypatch, quick, most):
    monkeypatch.setattr(remote_fetch, "_SMALL_PIECE_BYTES", 8 << 10)
    monkeypatch.setattr(remote_fetch, "_QUICK_SECONDS", 1e9 if quick else -1.0)
    asked = []

    class System:
        def cat_ranges(self, paths, starts, ends, on_error):
            asked.append(ends[-1] - starts[0])
            return [bytes(high - low) for low, high in zip(starts, ends, strict=True)]

    size = 3_000_001
    assert sum(map(len, remote_fetch._by_ranges(System(), "x", 5, size))) == size - 5
    assert max(asked) <= most
    assert quick == (max(asked) == most)


def test_no_store_there_and_refused(served, tmp_path):
    with pytest.raises(StoreError, match=r"/nothing has no store\.json"):
        open_store(served.url.replace("/store", "/store/nothing"))
    served.status = 403
    with pytest.raises(StoreError, match=r"store\.json is refused: .*403"):
        open_store(served.url)
    served.status = 0
    (served.folder / "store.json").write_text("<html>welcome to the airport</html>")
    with pytest.raises(
        CorruptError, match=r"http://127\.0\.0\.1:\d+/store/store\.json is not JSON"
    ):
        open_store(served.url)
    (served.folder / "shard-00000.h5").unlink()


def test_a_shard_that_is_missing_on_the_server_is_named(served, cache):
    (served.folder / "shard-00001.h5").unlink()
    named = r"no shard-00001\.h5. The manifest there names it"
    with open_store(served.url) as store, pytest.raises(StoreError, match=named):
        store.read_rows("features", 300, 310)
    assert parts(cache) == []


def test_nobody_at_the_address_and_unknown_schemes(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(StoreError, match=r"store\.json cannot be read from http://127"):
            open_store(f"http://127.0.0.1:{taken.getsockname()[1]}/store")
    with pytest.raises(InputError, match="carrier-pigeon"):
        open_store("carrier-pigeon://home/store")
    with pytest.raises(InputError, match="has a query"):
        open_store("http://host/store?token=1")


def test_a_protocol_that_connects_at_once_and_cannot(monkeypatch):
    def refuse(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(StoreError, match=r"cannot be read from ftp://nohost/x(.|\n)*not known"):
        open_store("ftp://nohost/x")


def test_passwords_are_not_shown(served):
    url = served.url.replace("http://", "http://me:secret@") + "/none"
    with pytest.raises(StoreError) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


# -- versions ------------------------------------------------------------------------------


def replace_store(folder: Path, seed: int) -> None:
    shutil.rmtree(folder)
    rng = np.random.default_rng(seed)
    write_store(folder, [simple_shard(rng, 300) for _ in range(NUM_SHARDS)]).close()


def test_without_a_connection_a_full_cache_works_and_says_so(served, packed, cache):
    with open_store(served.url) as store:
        store.verify()
    served.status = 503
    with open_store(served.url) as store, open_store(packed) as local:
        assert any(note.startswith("offline: store.json cannot be read") for note in store.notes)
        assert_same(store, local)


def test_the_version_seen_last_is_the_one_that_is_used_offline(served):
    first = served.folder.parent / "first"
    shutil.copytree(served.folder, first)
    with open_store(served.url) as store:
        store.verify()
    replace_store(served.folder, 1)
    with open_store(served.url) as store:
        store.verify()
    shutil.rmtree(served.folder)
    shutil.copytree(first, served.folder)
    with open_store(served.url) as store:
        assert_same(store, open_store(first))
    served.status = 503
    with open_store(served.url) as store:
        assert_same(store, open_store(first))


def test_a_store_packed_anew_is_seen_by_the_next_opening_and_never_mixed(served, packed, cache):
    with open_store(served.url) as old:
        old.read_rows("features", 0, 10)
        replace_store(served.folder, 1)
        # What is here goes on; what is not here any more is said.
        before = old.read_rows("features", 0, 300)
        with pytest.raises(StoreError, match="was replaced by another store after it was opened"):
            old.read_rows("features", 300, 310)
        with open_store(served.url) as new, open_store(served.folder) as local:
            assert_same(new, local)
            assert (new.read_rows("features", 0, 300) != before).any()
    with open_store(packed) as local:
        np.testing.assert_array_equal(before, local.read_rows("features", 0, 300))


def test_versions_without_shards_are_forgotten(served, cache):
    for seed in range(3):
        open_store(served.url).close()
        replace_store(served.folder, seed)
    assert len(list(cache.glob("*/*/store.json"))) == 1


def test_an_opened_version_that_was_forgotten_is_told_apart(served):
    with open_store(served.url) as old:
        replace_store(served.folder, 1)
        open_store(served.url).close()
        with pytest.raises(StoreError, match="was replaced by another store"):
            old.read_rows("features", 0, 10)


def test_strange_shard_names_are_refused(served):
    from stoker.store.manifest import seal

    document = json.loads((served.folder / "store.json").read_text())
    document.pop("manifest_checksum")
    document["shards"][0]["file"] = "remote.json"
    (served.folder / "store.json").write_text(seal(document))
    with pytest.raises(CorruptError, match=r"shard 'remote\.json' has a strange name"):
        open_store(served.url)


# -- the cache -----------------------------------------------------------------------------


def limit(monkeypatch, num_bytes: int) -> None:
    monkeypatch.setenv("STOKER_CACHE_LIMIT", str(num_bytes))


def test_the_copy_used_longest_ago_makes_room(served, packed, cache, monkeypatch):
    sizes = list(shard_sizes(packed).values())
    limit(monkeypatch, 2 * max(sizes) + 1000)
    with open_store(served.url) as store:
        assert any(note.startswith("slow: the store has") for note in store.notes)
        store.read_rows("features", 0, 10)
    with open_store(served.url) as store:
        store.read_rows("features", 300, 310)
    with open_store(served.url) as store:
        store.read_rows("features", 0, 10)  # used again: the other one is older now
    with open_store(served.url) as store:
        store.read_rows("features", 600, 610)
    assert copies(cache) == ["shard-00000.h5", "shard-00002.h5"]


def test_a_store_larger_than_the_cache_is_read_right_and_within_the_limit(
    served, packed, cache, monkeypatch
):
    """One process that uses all shards in turn lets go of its own."""
    most = max(shard_sizes(packed).values()) + 1000
    limit(monkeypatch, most)
    with open_store(served.url) as store, open_store(packed) as local:
        for start in (0, 300, 600, 100, 700, 400):
            rows = store.read_rows("features", start, start + 50)
            np.testing.assert_array_equal(rows, local.read_rows("features", start, start + 50))
            on_disk = sum(path.stat().st_size for path in cache.glob("*/*/*.h5"))
            assert on_disk <= most
        order = np.random.default_rng(0).permutation(900)
        np.testing.assert_array_equal(
            store.gather("targets", order), local.gather("targets", order)
        )


def test_a_cache_smaller_than_one_shard_is_an_error_at_once(served, monkeypatch):
    limit(monkeypatch, 1000)
    with open_store(served.url) as store:
        with pytest.raises(StoreError, match=r"no room for .* it may take 1000 B") as caught:
            store.read_rows("features", 0, 10)
        assert "STOKER_CACHE_LIMIT" in caught.value.fix


def test_copies_that_another_process_reads_are_not_removed(served, packed, cache, monkeypatch):
    limit(monkeypatch, max(shard_sizes(packed).values()) + 1000)
    monkeypatch.setattr(remote_cache, "_ROOM_SECONDS", 0.3)
    with open_store(served.url) as store:
        store.read_rows("features", 0, 10)
        path = next(cache.glob("*/*/*.h5"))
    with subprocess.Popen(
        [sys.executable, "-c", HOLD.format(path=str(path))], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        with open_store(served.url) as store:
            with pytest.raises(StoreError, match=r"in use: 1 file"):
                store.read_rows("features", 300, 310)
            assert path.exists()
            holder.kill()  # its lock ends with it, however it ends
            holder.wait(60)
            store.read_rows("features", 300, 310)
    assert copies(cache) == ["shard-00001.h5"]


HOLD = """
import time
from pathlib import Path
from stoker.store.remote_cache import open_copy
path = Path({path!r})
assert open_copy(path, path.stat().st_size) is not None
print("held", flush=True)
time.sleep(60)
"""


def test_a_full_disk_is_said_and_leaves_nothing_behind(served, packed, cache, monkeypatch):
    real = os.pwrite

    def full(descriptor, data, offset):
        if offset > 20_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data[:10_000], offset)

    with open_store(served.url) as store:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(StoreError, match="No space left on device") as caught:
            store.read_rows("features", 0, 10)
        assert "STOKER_CACHE=FOLDER" in caught.value.fix
        assert copies(cache) == []
        assert parts(cache) == []
        monkeypatch.setattr(os, "pwrite", real)
        with open_store(packed) as local:
            assert_same(store, local)


def test_a_real_small_disk(served, tmp_path, monkeypatch):
    """A disk that holds one shard and a half, and a limit that does not know it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    shard = max(shard_sizes(served.folder).values())
    size = shard * 3 // 2
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount")
    try:
        monkeypatch.setenv("STOKER_CACHE", str(disk))
        monkeypatch.setenv("STOKER_CACHE_LIMIT", "1GB")
        with open_store(served.url) as store:
            store.read_rows("features", 0, 10)
            store.read_rows("features", 300, 310)  # the first one goes
            assert copies(disk) == ["shard-00001.h5"]
            (store.path / "shard-00001.h5").unlink()
        free = shutil.disk_usage(disk).free
        (disk / "something else").write_bytes(b"x" * (free - shard // 2))
        with open_store(served.url) as store, pytest.raises(StoreError, match="no room for"):
            store.read_rows("features", 600, 610)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# -- what is not ours ------------------------------------------------------------------------------


def foreign_files(root: Path) -> dict[Path, str]:
    """Files of others at every depth of the cache, in the layout of copies and beside them."""
    places = [
        "thesis.tex",
        "a/b/thesis.tex",
        "a/b/shard-00000.h5",
        "photos/2024/1.jpg",
        "a/b/c/d.txt",
    ]
    made = {root / place: f"precious {place}" for place in places}
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (1, 1))  # older than any copy: the first to go
    return made


def test_files_of_others_below_the_cache_are_neither_removed_nor_counted(
    served, packed, cache, monkeypatch
):
    precious = foreign_files(cache)
    sizes = shard_sizes(packed)
    limit(monkeypatch, 2 * max(sizes.values()) + 1)
    with open_store(served.url) as store:
        for start in (0, 300, 600):
            store.read_rows("features", start, start + 50)
    for version in cache.glob("*/*/remote.json"):
        path = version.parent / "shard-00099.h5"  # in our folder, and in no manifest
        path.write_text("precious")
        os.utime(path, (1, 1))
        precious[path] = "precious"
    with open_store(served.url) as store:
        for start in (0, 300, 600, 100, 400):
            store.read_rows("features", start, start + 50)
        assert remote_cache.Cache.here().used_bytes() <= 2 * max(sizes.values())
    assert {path: path.read_text() for path in precious} == precious


@pytest.mark.parametrize("below_the_cache", [False, True])
def test_a_store_with_a_remote_json_of_its_own_is_no_copy(
    served, packed, cache, tmp_path, monkeypatch, below_the_cache
):
    """Anybody's folder may hold such a file: it made its grandparent a cache, to be cleared."""
    home = cache if below_the_cache else tmp_path / "home"
    precious = foreign_files(home)
    store = home / "downloads" / "somebodys"
    shutil.copytree(packed, store)
    (store / "shard-00001.h5").unlink()
    for origin in (
        {"url": served.url, "manifest": "somebodys"},
        {"url": served.url, "manifest": store.name, "cache": "0123"},
        {"url": "http://127.0.0.1:1/x"},
    ):
        (store / "remote.json").write_text(json.dumps(origin))
        limit(monkeypatch, 2 * sum(shard_sizes(packed).values()))
        done = CliRunner().invoke(app, ["inspect", str(store)])
        assert isinstance(done.exception, StoreError)
        done = CliRunner().invoke(app, ["verify", str(store)])
        assert done.exit_code != 0
        assert {path: path.read_text() for path in precious} == precious
        assert not (store / "shard-00001.h5").exists()
    assert not served.sent.get("shard-00001.h5")


def test_a_manifest_that_lies_about_sizes_removes_nothing_but_copies(
    served, packed, cache, monkeypatch
):
    from stoker.store.manifest import read_manifest

    precious = foreign_files(cache)
    with open_store(served.url) as store:
        read_all(store)
    manifest = read_manifest(served.folder)
    shards = [shard.model_copy(update={"size_bytes": 10**15}) for shard in manifest.shards]
    lying = manifest.model_copy(update={"shards": shards})
    lying._checksum = ""
    (served.folder / "store.json").write_text(lying.to_text())
    with open_store(served.url) as store, pytest.raises(StoreError, match="no room for"):
        read_all(store)
    assert {path: path.read_text() for path in precious} == precious
    assert copies(cache)  # what cannot fit anyway makes nothing else go


@pytest.mark.parametrize("what", ["file", "link"])
def test_a_lock_of_somebody_else_is_refused(served, cache, tmp_path, what):
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("precious")
    cache.mkdir(parents=True, exist_ok=True)
    if what == "file":
        (cache / "lock").write_text("precious")
    else:
        (cache / "lock").symlink_to(thesis)
    with open_store(served.url) as store, pytest.raises(InputError, match="lock was not made by"):
        read_all(store)
    assert thesis.read_text() == "precious"
    assert (cache / "lock").read_text() == "precious"


def test_copies_that_are_links_are_not_followed(served, packed, cache, tmp_path):
    with open_store(served.url) as store:
        read_all(store)
    (version,) = (path.parent for path in cache.glob("*/*/remote.json"))
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("precious")
    shard = version / "shard-00000.h5"
    shard.unlink()
    shard.symlink_to(thesis)
    with contextlib.suppress(StoreError), open_store(served.url) as store:
        read_all(store)
    assert thesis.read_text() == "precious"


def test_a_cache_of_an_older_version_is_taken_over(served, packed, cache):
    with open_store(served.url) as store:
        read_all(store)
    for origin in cache.glob("*/*/remote.json"):
        document = json.loads(origin.read_text())
        del document["cache"]
        origin.write_text(json.dumps(document))
    (cache / ".stoker").unlink()
    before = dict(served.sent)
    with open_store(served.url) as store, open_store(packed) as local:
        assert_same(store, local)
    grown = {name: served.sent[name] - before[name] for name in before if name.endswith(".h5")}
    assert set(grown.values()) == {0}


@pytest.mark.parametrize("text", ["plenty", "150%", "-1"])
def test_a_limit_that_is_no_size_is_refused(served, monkeypatch, text):
    monkeypatch.setenv("STOKER_CACHE_LIMIT", text)
    with pytest.raises(InputError, match="STOKER_CACHE_LIMIT"):
        open_store(served.url)


def test_where_the_cache_lies(monkeypatch, tmp_path):
    monkeypatch.delenv("STOKER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert remote_cache.cache_root() == tmp_path / "stoker" / "stores"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert remote_cache.cache_root() == Path.home() / ".cache" / "stoker" / "stores"


def test_a_cache_that_cannot_be_made_is_named(served, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(StoreError, match=r"the cache folder .* cannot be made"):
        open_store(served.url)


# -- several at once -----------------------------------------------------------------------

READ = """
import hashlib, sys
from stoker.store.reader import open_store
with open_store(sys.argv[1]) as store:
    print(hashlib.sha256(store.read_rows("features", 0, store.num_samples).tobytes()).hexdigest())
"""


def test_two_processes_at_once_fetch_every_shard_once(served, packed, cache):
    command = [sys.executable, "-c", READ, served.url]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = {reader.communicate(timeout=200)[0] for reader in readers}
    assert len(answers) == 1
    assert len(answers.pop()) == 65
    for name, size in shard_sizes(packed).items():
        assert served.sent[name] == size + 1
    with open_store(served.url) as store, open_store(packed) as local:
        assert_same(store, local)


def test_a_version_that_another_process_has_begun_to_write_is_not_taken_for_foreign(
    served, packed, cache
):
    with open_store(served.url) as store:
        folder = store.path
    for name in (remote.ORIGIN_NAME, "store.json"):
        (folder / name).unlink()
    begun = folder / f".{remote.ORIGIN_NAME}.0123abcd.tmp"
    begun.touch()
    with open_store(served.url) as store, open_store(packed) as local:
        assert_same(store, local)
    (folder / remote.ORIGIN_NAME).unlink()
    (folder / "store.json").unlink()
    (folder / "mine.txt").touch()
    with pytest.raises(InputError, match="was not made by stoker"):
        open_store(served.url)


def test_a_process_killed_while_fetching_leaves_nothing_that_hurts(served, packed, cache):
    served.dies_after, served.deaths_left = 30_000, 10**6
    with subprocess.Popen(
        [sys.executable, "-c", READ, served.url], stderr=subprocess.DEVNULL
    ) as one:
        deadline = time.monotonic() + 60
        while not parts(cache) and time.monotonic() < deadline:
            time.sleep(0.01)
        one.kill()
    assert parts(cache)
    served.deaths_left = 0
    with open_store(served.url) as store, open_store(packed) as local:
        assert_same(store, local)
    assert parts(cache) == []


def test_many_threads_in_a_small_cache(served, packed, monkeypatch):
    """Shards are let go of and fetched again under the threads' hands; every row is right."""
    limit(monkeypatch, 2 * max(shard_sizes(packed).values()) + 1000)
    failures = []
    with open_store(served.url, threads=1) as store, open_store(packed) as local:
        expected = local.read_rows("features", 0, 900)

        def read(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for start in rng.integers(0, 890, 15):
                if start // 300 == (start + 9) // 300:
                    rows = store.read_rows("features", int(start), int(start) + 10)
                    if not np.array_equal(rows, expected[start : start + 10]):
                        failures.append(start)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200)
    assert failures == []


def test_waiting_for_a_process_that_does_not_go_on_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_cache, "_PATIENCE_SECONDS", 0.3)
    whole = tmp_path / "shard-00000.h5"
    with contextlib.ExitStack() as stack:
        assert stack.enter_context(remote_cache.claimed_part(whole, 100)) is not None
        with pytest.raises(StoreError, match=r"without progress for 0\.3 s"):
            stack.enter_context(remote_cache.claimed_part(whole, 100))


def test_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(ImportError, match=r"\[remote\]"):
        open_store("http://127.0.0.1:1/store")
    monkeypatch.setitem(sys.modules, "s3fs", None)  # no extra of stoker's brings it
    with pytest.raises(ImportError, match="needs the package 's3fs'") as caught:
        open_store("s3://bucket/store")
    assert caught.value.fix == "pip install s3fs"


def test_the_page_runs_and_its_messages_are_those_of_the_code(served, capsys):
    page = (Path(__file__).parent.parent / "docs" / "remote.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.S)
    example = example.replace("https://data.example.org/store", served.url)
    exec(compile(example, "docs/remote.md", "exec"), {})
    assert "(2, 7, 5)" in capsys.readouterr().out
    folder = Path(remote.__file__).parent
    files = [folder / "arrays.py", *folder.glob("remote*.py")]
    code = " ".join(" ".join(file.read_text() for file in files).split())
    for message in re.findall(r"^\| `(.*?)`.* \|", page, re.M)[2:]:
        for piece in message.split("..."):
            assert piece.strip().removesuffix(" store.json") in code, piece
