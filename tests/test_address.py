"""What of a URL may be shown: passwords and tokens never, wherever they stand and whatever is in them."""

from __future__ import annotations

import json
import pickle
import traceback
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stoker import address, page
from stoker.address import (
    as_url,
    has_secret,
    is_readable,
    keep_secrets,
    masked,
    parts,
    shown,
    without_secrets,
)
from stoker.display import command, printable, quoted
from stoker.errors import InputError, SourceError, StoreError, require_file
from stoker.report import RunLog, read_run_log
from stoker.sources.fingerprint import fingerprint
from stoker.store.manifest import Manifest
from stoker.store.remote_fetch import Remote, _login_header, _split_login

# Three words that occur nowhere else, with whatever stands between them.
WORDS = ("Qz7v", "Wx9k", "Jy4h")
ODD = st.text(
    st.sampled_from("@/:#?%&=+ ~!$'\"()*,;[]{}<>|\\^`é密🔑\u202e\x1b\n\t.-_aB3"), max_size=6
)
SECRET = st.builds(
    lambda a, b: f"{WORDS[0]}{a}{WORDS[1]}{b}{WORDS[2]}".replace("::", ":"), ODD, ODD
)
SCHEMES = ["http", "https", "s3", "gs", "abfs", "sftp", "ftp", "hdfs", "webdav", "HTTP"]
OUTER = ["", "simplecache::", "filecache::", "zip://inner/x::", "tar://a.h5::blockcache::"]
HOSTS = ["host", "127.0.0.1:8080", "[::1]:80", "data.example.org", "bucket"]
PATHS = ["/store", "", "/a/b c/store", "/store/store.json"]


@st.composite
def addresses(draw) -> str:
    """Return a URL with a secret in one of the places where URLs have them."""
    secret = draw(SECRET)
    where = draw(st.sampled_from(["user:", "user", ":", "both", "?token=", "?", "#", "?a=b&sig="]))
    login = tail = ""
    if where in ("?token=", "?", "#", "?a=b&sig="):
        tail = where + secret
    else:
        login = {"user:": f"ann:{secret}@", "user": f"{secret}@", ":": f":{secret}@"}.get(
            where, f"{secret}:{secret}@"
        )
    outer, scheme = draw(st.sampled_from(OUTER)), draw(st.sampled_from(SCHEMES))
    return f"{outer}{scheme}://{login}{draw(st.sampled_from(HOSTS))}{draw(st.sampled_from(PATHS))}{tail}"


@pytest.fixture(autouse=True)
def forget() -> None:
    _forget()


def _forget() -> None:
    """Secrets that share words would hide each other's."""
    address._met, address._secrets = {}, ()


def assert_hidden(text: str) -> None:
    for word in WORDS:
        assert word not in text, text


@given(addresses())
@example("http://u:Qz7v@Wx9k@host/store")
@example("http://u:Qz7v/Wx9k@host/store")
@example("http://u:Qz7v#Wx9k@host/store")
@example("simplecache::http://u:Qz7v@host/x")
@example("https://Qz7v@host/x")
@example("https://host/x?mail=a@b&sig=Qz7v")
@example("https://host/x?mail=a@b/c&sig=Qz7v")
@example("https://host/x?X-Amz-Signature=Qz7v#Wx9k")
def test_no_part_of_a_secret_is_shown(url):
    assert has_secret(url)
    for text in (without_secrets(url), shown(url), shown(Path(url))):
        assert_hidden(text)
        assert address.MARK in text
    assert without_secrets(without_secrets(url)) == without_secrets(url)


@given(addresses())
@example("https://host/x y?mail=a@b/c&sig=Qz7v")
@example("https://host/x y?mail=a@b/c d&sig=Qz7v")
def test_no_text_that_repeats_an_address_shows_a_secret(url):
    _forget()
    keep_secrets(f"--store={url}")
    for text in (url, str(Path(url)), repr(url), f"{url}/store.json", json.dumps(url)):
        assert_hidden(masked(f"cannot read {text}: a 'port', and so on"))
        assert_hidden(printable(f"[Errno 2] {text}."))
        assert_hidden(page.name(f"{text} …"))
        assert_hidden(quoted(text))
    assert_hidden(command("stoker", "train", "--set", f"recipe.store={url}", Path(url)))


@given(addresses())
def test_no_error_repeats_a_secret(url):
    _forget()
    as_url(url)
    parents = [*Path(url).parents][:-2]
    errors = [
        *(InputError(f"{path} is away.", "", f"ls {path}") for path in parents),
        InputError(f"{url} is odd.", f"not {url!r}", f"stoker inspect {url}", [url]),
        StoreError(f"{Path(url)}: {ValueError(url)}"),
    ]
    with pytest.raises(SourceError) as caught:
        require_file(url, "table")
    for error in (*errors, caught.value, pickle.loads(pickle.dumps(errors[0]))):
        assert_hidden(str(error))
        assert_hidden("".join(traceback.format_exception(error)))
    assert_hidden(repr(Remote(url)))


@given(addresses())
def test_no_library_gets_the_login_of_a_web_address(url):
    plain, login = _split_login(url)
    if not login or not all(is_readable(*part) for part in parts(url)):
        return  # not a web address with a login, or one that is refused
    assert plain == url.replace(f"{login}@", "", 1)
    header = _login_header(login)["Authorization"]
    keep_secrets(url)
    assert header.partition(" ")[2] not in masked(f"{header} {url}")


@given(addresses(), st.booleans())
def test_no_log_or_page_repeats_a_secret(tmp_path_factory, url, as_path):
    _forget()
    keep_secrets(url)
    folder = tmp_path_factory.mktemp("run")
    values = {"settings": {"store": Path(url) if as_path else url, "list": [url]}, url: "key"}
    with RunLog(folder / "run.jsonl") as log:
        log.write("config", values)
        log.write("note", {"text": f"store: {url}"})
    assert_hidden((folder / "run.jsonl").read_text())
    assert len(read_run_log(folder / "run.jsonl")) == 2
    body = page.join([page.facts({"Store": url, url: "x"}), page.paragraph(url), page.code(url)])
    html = page.html(f"stoker inspect {url}", [page.Section("a", url, body)], subtitle=url)
    assert_hidden(html)


def test_a_cut_name_shows_no_half_of_a_secret():
    """Half a URL does not show where its token ends."""
    url = f"http://{'Qz7v' * 100}@host/x"
    for html in (page.name(url), page.code(url + "y" * 600), page.facts({"a": url})):
        assert_hidden(html)
        assert "http://***@host/x" in html


class AddressSource:
    """Somebody's own source, which reads from an address."""

    kind, version = "own", 1

    def __init__(self, url: str) -> None:
        self.url = url

    def files(self):
        return []

    def options(self):
        return {"from": self.url, "nested": [{"also": self.url}]}


def test_a_manifest_holds_no_secret_and_still_tells_addresses_apart():
    one, other = "http://u:Qz7vWx9kJy4h@host/a?id=1", "http://u:Qz7vWx9kJy4h@host/a?id=2"
    made, same, third = (fingerprint(AddressSource(url), {}) for url in (one, one, other))
    text = Manifest(num_samples=0, fields={}, shards=[], provenance=made).to_text()
    assert_hidden(text)
    assert "host" not in text.partition("http")[2][:3]
    assert made == same
    assert made != third
    plain = fingerprint(AddressSource("http://host/a"), {})
    assert plain.options == {"from": "http://host/a", "nested": [{"also": "http://host/a"}]}


def test_an_identity_holds_no_secret_and_a_new_password_is_the_same_run():
    from stoker.train.checkpoint import _as_json, differences

    old = {"store": "http://u:Qz7v@host/a", "paths": [Path("http://u:Qz7v@host/b")]}
    new = {"store": "http://u:Wx9k@host/a", "paths": [Path("http://u:Wx9k@host/b")]}
    assert_hidden(json.dumps(_as_json(old)))
    assert differences(_as_json(old), _as_json(new)) == []


# -- what is not secret stays ----------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "http://host/store", "http://127.0.0.1:8000/store", "http://[::1]:80/x", "s3://bucket/key",
        "tcp://scheduler:8786", "file:///home/a@b/store?x#y", "memory://bucket/store",
        "zip://a/b::https://host/x.zip", "abfs://container@account.dfs.core.windows.net/store",
        "C:/Users/a@b", "a@b.org", "see http://host/x, or mail a@b.org", "EURUSD:M5=bars/x@1.csv",
        "http://host/store?", "note: /tmp/a@b", "package.module:Class", "chrome://tracing",
    ],
)  # fmt: skip
def test_texts_without_a_secret_stay_as_they_are(text):
    assert masked(text) == text
    assert printable(text) == text
    if text.partition(" ")[0] == text:
        assert shown(text) == text


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("http://ann:pw@host/store", "http://***@host/store"),
        ("http://token@host:80/store", "http://***@host:80/store"),
        ("simplecache::http://u:p@host/x", "simplecache::http://***@host/x"),
        ("filecache::s3://key:se/cret@bucket/x", "filecache::s3://***@bucket/x"),
        ("zip://in::https://u:p@h/x.zip?sig=1", "zip://in::https://***@h/x.zip?***"),
        ("https://h/x#frag", "https://h/x#***"),
        ("http://u:p?w@host/x", "http://***"),
        ("http://u:pw/x", "http://***"),  # a password whose @ was forgotten
        ("abfs://user:key@account.dfs.core.windows.net/x", "abfs://***@account.dfs.core.windows.net/x"),
    ],
)  # fmt: skip
def test_what_is_left_of_an_address(url, seen):
    assert shown(url) == shown(Path(url)) == masked(url) == seen
    assert masked(f"it says '{url}'.") == f"it says '{seen}'."


def test_a_folder_that_looks_like_an_address_is_shown_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "http:" / "u:p@host").mkdir(parents=True)
    assert shown("http:/u:p@host") == "http:/u:p@host"


def test_the_memory_of_addresses_is_bounded():
    for number in range(2 * address._MOST_ADDRESSES):
        keep_secrets(f"http://u:pw{number}@host/x")
    assert len(address._met) == address._MOST_ADDRESSES
    newest, oldest = f"u:pw{number}@", "u:pw0@"
    assert masked(f"{newest} {oldest}") == f"***@ {oldest}"  # prose is searched for the newest only
    assert masked(f"http://{newest}h and http://{oldest}h") == "http://***@h and http://***@h"


def test_short_passwords_are_not_searched_in_other_words():
    keep_secrets("http://a:features@host/x")
    keep_secrets("http://anonymous@host/x")
    assert (
        masked("the field features, for anonymous users")
        == "the field features, for anonymous users"
    )
    assert masked("login a:features@host failed") == "login ***@host failed"
    keep_secrets("http://a@host/x")
    assert masked("data@x and http://a@host") == "data@x and http://***@host"


def test_bytes_that_are_not_text_are_hidden_as_well():
    url = "http://u:Qz7v\udcffWx9k@host/x"
    keep_secrets(url)
    assert_hidden(shown(url) + masked(f"{url!r} {url}") + quoted(url))
    assert len(address.slow_digest(url)) == 16
