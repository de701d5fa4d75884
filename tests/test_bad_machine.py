"""Full disks, closed streams, missing packages, odd names: exit 2 with the thing named, in every command."""

from __future__ import annotations

import ast
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import stoker
from source_trees import nodes
from stoker import errors
from stoker.strict_json import MAX_DEPTH, json_text, parse_json
from stoker.units import local_time
from warm_stoker import shared

PACKAGE = Path(stoker.__file__).parent


@pytest.fixture(scope="module")
def run():
    """A function that runs one command in a folder, and returns its code, stdout and stderr."""

    def run(folder, words, limit=0, blocked=(), **variables):
        done = shared().run(words, folder, {**os.environ, **variables}, limit, blocked)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture(scope="module")
def place(tmp_path_factory, run):
    """A table, arrays, a library, a packed store and a trained run."""
    folder = tmp_path_factory.mktemp("place")
    rng = np.random.default_rng(0)
    rows = [f"{a},{b},{number % 3}" for number, (a, b) in enumerate(rng.random((3000, 2)))]
    (folder / "t.csv").write_text("\n".join(["a,b,y", *rows]) + "\n")
    (folder / "s.csv").write_text("\n".join(["a,b,y", *rows[:31]]) + "\n")
    np.save(folder / "x.npy", rng.random((3000, 4)))
    np.savez(folder / "x.npz", x=rng.random((3000, 4)))
    bars = [f"{1577836800 + 60 * minute},1.1,1.2,1.0,1.1,5" for minute in range(3000)]
    (folder / "EURUSD_M1.csv").write_text("\n".join(["time,open,high,low,close,volume", *bars]))
    peaks = " ".join(f"{20 + mass} 9;" for mass in range(40))
    record = f"SMILES: CCO\nMW: 46\nNum Peaks: 40\n{peaks}\n\n"
    (folder / "lib.msp").write_text("".join(f"Name: {n}\n{record}" for n in range(100)))
    (folder / "c.yaml").write_text(
        "recipe: {name: tabular, store: small}\n"
        "training: {batch_size: 1024, epochs: 1, lr: 1.0e-3}\nrun: {dir: run}\n"
    )
    code, _, said = run(folder, ["pack", "table", "s.csv", "small", "--target", "y", "--jobs", "1"])
    assert code == 0, said
    code, out, said = run(folder, ["train", "--config", "c.yaml", "--device", "cpu", "--json"])
    assert code == 0, said
    json.loads(out, parse_constant=pytest.fail)
    return folder


# -- disks -----------------------------------------------------------------------------------------

WRITING = {
    "out1.partial": ["pack", "table", "t.csv", "out1", "--target", "y", "--jobs", "1"],
    "out2.partial": ["pack", "arrays", "x.npy", "out2", "--jobs", "1"],
    "out3.partial": ["pack", "arrays", "x.npz", "out3", "--jobs", "1"],
    "out4.partial": ["pack", "bars", "EURUSD_M1.csv", "out4", "--windows", "M1=32", "--base", "M1", "--jobs", "1"],
    "out5.partial": ["pack", "massspec", "out5", "--msp", "lib.msp", "--jobs", "2"],
    "table-00000.arrow": ["inspect", "t.csv"],
    "page.html": ["inspect", "small", "--html", "page.html"],
    "report.html": ["report", "run", "--out", "report.html"],
    "run2": ["train", "--config", "c.yaml", "--device", "cpu", "--run-dir", "run2"],
    "m.safetensors": ["export", "run/best.pt", "m.safetensors"],
    "p.parquet": ["predict", "run/best.pt", "small", "p.parquet", "--device", "cpu"],
    "q.pt": ["export", "run/best.pt", "q.pt", "--int8"],
    "d.json": ["doctor", "--out", "d.json", "--", "true"],
}  # fmt: skip


@pytest.mark.parametrize("name", WRITING)
def test_a_file_that_cannot_be_written_is_named_by_every_command(place, run, name):
    if "massspec" in WRITING[name]:
        pytest.importorskip("rdkit")
    # Every file is too large: what a full disk does, without a disk.
    code, _, said = run(place, WRITING[name], limit=256)
    assert code == 2, said
    assert name in said, said
    assert "File too large" in said, said
    assert "Try: " in said, said
    assert "a fault in stoker" not in said, said
    # What they had written before it failed is gone.
    left = {path.name for path in place.rglob("*") if path.is_file() and ".partial" in str(path)}
    assert left <= {".stoker", "lock", "job.json"}, left


@pytest.mark.parametrize(
    "kind", ["full", pytest.param("inodes", marks=pytest.mark.slow), "read-only"]
)
def test_a_small_disk_is_named(place, kind):
    disk = place / "disk"
    disk.mkdir(exist_ok=True)
    options = {"full": "size=16k", "inodes": "nr_inodes=1", "read-only": "ro"}[kind]
    mount = f"mount -t tmpfs -o {options} tmpfs {disk}"
    if subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False
    ).returncode:
        pytest.skip("no user namespaces here, so no disk of our own")
    words = f"{sys.executable} -m stoker pack table t.csv disk/out --target y --jobs 1"
    full = f"head -c 12k /dev/zero > {disk}/pad;" if kind == "full" else ""
    script = f"{mount}; {full} {words} || exit $?"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "disk/out.partial" in done.stderr
    reason = os.strerror(errno.EROFS if kind == "read-only" else errno.ENOSPC)
    assert reason in done.stderr


@pytest.mark.parametrize("code", sorted(errors._ALLOWED))
def test_each_code_of_the_system_is_told_with_its_file(code):
    for error in (
        OSError(code, os.strerror(code), "a/b.h5"),
        OSError(f"Unable to create file (errno = {code}, error message = 'x')"),
        RuntimeError(f"I/O error: x (os error {code})"),
    ):
        told = errors.file_error(error, "a/b.h5")
        assert told.exit_code == errors.EXIT_INPUT
        assert os.strerror(code) in told.given
        assert "a/b.h5" in told.given
        assert told.allowed
        assert told.fix


def test_a_disk_is_full_also_when_an_error_is_its_own_cause():
    error = errors.unwritable("a", OSError(errno.ENOSPC, "x"))
    error.__cause__ = error
    assert not errors.is_full_disk(error)
    error.__cause__ = OSError(errno.ENOSPC, "x")
    assert errors.is_full_disk(error)


@pytest.mark.parametrize("error", [OSError(errno.EBADF, "x"), OSError("x"), KeyError("x")])
def test_faults_of_our_own_stay_faults(error):
    assert errors.file_error(error) is None


# -- streams, folders, names -----------------------------------------------------------------------


def test_a_full_disk_behind_stdout_is_an_error():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "stoker", "machine", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert "standard output: No space left on device" in done.stderr


@pytest.mark.parametrize(
    "closed",
    [
        pytest.param(">&-", marks=pytest.mark.slow),
        pytest.param("2>&-", marks=pytest.mark.slow),
        ">&- 2>&- <&-",
        "| head -c 1",
    ],
)
def test_streams_may_be_closed(closed):
    script = f"{sys.executable} -m stoker machine {closed}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_what_a_terminal_cannot_show_is_escaped(tmp_path):
    (tmp_path / "日本.csv").write_text("a,b\n1,2\n")
    words = [sys.executable, "-m", "stoker", "inspect", "日本.csv"]
    env = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert rb"\u65e5\u672c.csv" in done.stdout


def test_a_closed_stdout_is_not_taken_by_a_file(place):
    # Descriptor 1 is free: the page would get it, and with it all that is printed.
    script = f"{sys.executable} -m stoker inspect small --html closed.html >&-"
    assert subprocess.run(["sh", "-c", script], cwd=place, check=False).returncode == 0
    text = (place / "closed.html").read_text()
    assert text.endswith("</html>\n") or text.rstrip().endswith("</html>")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["demo"], marks=pytest.mark.slow),
        ["config", "check", "c.yaml"],
    ],  # it imports torch
)
def test_a_working_folder_that_is_gone(tmp_path, words):
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"cd {gone}; rmdir {gone}; {sys.executable} -m stoker {' '.join(words)}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "a fault in stoker" not in done.stderr


def test_without_a_home_folder_only_the_cache_is_missing(place, monkeypatch):
    from stoker.store.reader import open_store
    from stoker.store.remote_cache import cache_root

    def no_home(path):
        if str(path).startswith("~"):
            raise RuntimeError("Could not determine home directory.")
        return path

    monkeypatch.setattr(Path, "expanduser", no_home)
    for name in ("STOKER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert "home-folder-unknown" in str(cache_root())
    with open_store(place / "small") as store:
        assert len(store) == 31
    with pytest.raises(errors.StokerError, match="STOKER_CACHE"):
        open_store("memory://nowhere")


@pytest.mark.parametrize("zone", ["XYZ+25:99", "../../etc/passwd"])
def test_a_time_zone_of_nonsense_does_no_harm(place, run, zone):
    code, _, said = run(place, ["report", "run", "--out", "zone.html"], TZ=zone)
    assert code == 0, said


@given(st.floats(allow_nan=False))
def test_every_moment_has_a_date(seconds):
    assert local_time(seconds).year >= 1


ODD = os.fsdecode(b"b\xff\xfed")


@pytest.mark.parametrize(
    "words",
    [
        ["pack", "table", f"{ODD}.csv", "o", "--target", "y", "--jobs", "1"],
        ["pack", "table", "s.csv", f"{ODD}o", "--target", "y", "--jobs", "1"],
        ["pack", "arrays", f"{ODD}.npy", "o", "--jobs", "1"],
        ["inspect", f"{ODD}.csv"],
        ["inspect", f"{ODD}.npy"],
        ["inspect", "small", "--html", f"{ODD}.html"],
        ["report", "run", "--out", f"{ODD}2.html", "--json"],
        ["predict", "run/best.pt", "small", f"{ODD}.parquet", "--device", "cpu"],
        ["export", "run/best.pt", f"{ODD}.onnx"],
        ["verify", ODD],
    ],
    ids=lambda words: words[0],
)
def test_names_that_are_not_utf8_work_or_are_named(place, run, words):
    (place / f"{ODD}.csv").write_text((place / "s.csv").read_text())
    np.save(place / f"{ODD}.npy", np.ones((9, 2)))
    code, out, said = run(place, words)
    assert code in (0, 2), said
    assert "a fault in stoker" not in said
    assert code == 0 or "b\\xff\\xfed" in said, said
    if "--json" in words:
        json.loads(out)


@pytest.mark.parametrize("name", ["recipe.store", "run.dir"])
def test_nul_in_a_config_is_refused_by_its_key(name):
    from stoker.config import parse_config

    with pytest.raises(errors.ConfigError, match=rf"{name}.*NUL"):
        parse_config("{}", overrides=[f'{name}="a\\0b"'])


# -- packages --------------------------------------------------------------------------------------

EXTRAS = {
    "PIL": (["pack", "images", "img", "oi", "--jobs", "1"], "vision"),
    "rdkit": (["pack", "massspec", "om", "--msp", "lib.msp", "--jobs", "1"], "chem"),
    "matplotlib": (["report", "run", "--png", "png", "--out", "png.html"], "plots"),
    "onnx": (["export", "run/best.pt", "m.onnx"], "onnx"),
    "onnxscript": (["export", "run/best.pt", "m.onnx"], "onnx"),
    "onnx_ir": (["export", "run/best.pt", "m.onnx"], "onnx"),
    "safetensors": (["export", "run/best.pt", "m2.safetensors"], "safetensors"),
    "fsspec": (["inspect", "http://127.0.0.1:1/x"], "remote"),
    "distributed": (["pack", "table", "s.csv", "oc", "--target", "y", "--cluster", "tcp://127.0.0.1:1"], "cluster"),
    "pyarrow": (["pack", "table", "s.csv", "oc", "--target", "y", "--jobs", "1"], ""),
}  # fmt: skip


@pytest.mark.parametrize("module", EXTRAS)
def test_a_missing_package_is_named_with_the_line_that_installs_it(place, run, module):
    words, extra = EXTRAS[module]
    if module == "PIL":
        pillow = pytest.importorskip("PIL.Image")
        (place / "img/a").mkdir(parents=True, exist_ok=True)
        pillow.new("RGB", (8, 8)).save(place / "img/a/0.png")
    code, _, said = run(place, words, blocked=[module])
    assert code == 2, said
    assert "a fault in stoker" not in said
    assert errors._EXTRAS.get(module, (module,))[0] in said
    root = PACKAGE.parents[1]
    assert f"[{extra}]" in said if extra else f"pip install -e {root}" in said
    assert "pip install -e" in said


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"dir_info": {}, "url": "file:///a%20b"}', "'stoker[vision] @ file:///a%20b'"),
        ('{"vcs_info": {}, "url": "https://t:s@h/s.git"}', "git+https://***@h/s.git"),
        (None, "pip install 'stoker[vision]'"),
        ("[]", "pip install 'stoker[vision]'"),
    ],
)
def test_an_installed_wheel_is_installed_again_from_where_it_came(
    tmp_path, monkeypatch, text, what
):
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "lib/stoker/errors.py"))
    found = SimpleNamespace(read_text=lambda name: text)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: found)
    assert what in errors.install_command("vision")


def test_extras_are_those_of_the_project():
    import tomllib

    extras = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for module, (package, extra) in errors._EXTRAS.items():
        assert extra in extras
        named = any(line.startswith(package) for line in extras[extra])
        assert named or module in ("dask", "onnx_ir")


def test_a_package_of_somebody_else_is_installed_by_its_own_name():
    told = errors.missing_package(ModuleNotFoundError("no", name="their.module"))
    assert told.fix == "pip install their"
    assert errors.missing_package(ImportError("cannot import name", name="stoker.x")) is None


# -- JSON ------------------------------------------------------------------------------------------

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda below: st.lists(below) | st.dictionaries(st.text(), below),
)


@given(plain)
def test_json_is_strict_whatever_it_is_given(document):
    def refuse(word):
        raise AssertionError(word)

    json.loads(json_text(document), parse_constant=refuse)
    json.loads(json_text(document, indent=1, ensure_ascii=False), parse_constant=refuse)


@given(st.integers(1, 20_000), st.sampled_from("[{"))
@example(MAX_DEPTH, "[")
@example(MAX_DEPTH + 1, "[")
@example(MAX_DEPTH + 1, "{")
def test_deep_json_is_a_value_error_and_never_more(depth, bracket):
    text = "[" * depth + "]" * depth if bracket == "[" else '{"a":' * depth + "1" + "}" * depth
    if depth <= MAX_DEPTH:
        assert json_text(parse_json(text)) == text.replace(":", ": ")
        return
    for given_text in (text, text.encode()):
        with pytest.raises(ValueError, match="nested more than 100"):
            parse_json(given_text)


def test_json_is_written_and_read_in_one_place():
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE)
        if inside.parts[:2] == ("doctor", "probe") or inside.name == "strict_json.py":
            continue
        for node in nodes(path.read_text(), ast.Import, ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert "json" not in names, f"{inside} imports json: stoker.strict_json is for that"


def test_text_with_nan_is_for_ourselves_only():
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "exact_text" in path.read_text()
    }
    assert users <= {
        "strict_json.py", "address.py", "config/load.py", "config/resolve.py", "packing/gate.py",
        "recipes/catalogue.py", "compat/massspec_memory.py", "recipes/export/weights_file.py",
        "sources/fingerprint.py", "store/manifest.py", "train/checkpoint.py",
        "train/checkpoint_file.py", "train/launch.py", "train/heartbeat.py",
            "runs/evaluation.py", "sources/contract.py",
    }  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "nowhere", "--json"],
        ["verify", "nowhere", "--json"],
        ["pack", "table", "nowhere.csv", "o", "--json"],
        ["train", "--config", "nowhere.yaml", "--json"],
        ["report", "nowhere", "--json"],
        ["predict", "nowhere.pt", "small", "p", "--json"],
        ["export", "nowhere.pt", "m.onnx", "--json"],
        ["plan", "nowhere", "--json"],
        ["doctor", "--json", "--", "nowhere"],
    ],
    ids=lambda words: words[0],
)
def test_an_error_is_a_document_where_one_was_promised(place, run, words):
    code, out, said = run(place, words)
    assert code == 2
    assert json.loads(out)["error"]["exit_code"] == 2
    assert json.loads(out)["error"]["given"] in said


def test_a_script_has_its_own_json(place, run):
    code, out, _ = run(place, ["doctor", "nowhere", "--json"])
    assert (code, out) == (2, "")


def deep(where, name):
    (where / name).write_text("[" * 20_000)


def test_deep_json_and_yaml_are_named(place, run, tmp_path):
    (tmp_path / "store").mkdir()
    deep(tmp_path / "store", "store.json")
    (tmp_path / "deep.yaml").write_text("a: " + "[" * 500 + "]" * 500)
    (tmp_path / "run").mkdir()
    log = (place / "run/run.jsonl").read_text()
    (tmp_path / "run/run.jsonl").write_text(log + "[" * 20_000 + "\n")
    deep(tmp_path / "run", "doctor.json")
    commands = [
        ["inspect", "store"],
        ["verify", "store"],
        ["train", "--config", "deep.yaml"],
        ["config", "check", "deep.yaml"],
        ["report", "run"],
    ]
    found = [run(tmp_path, words) for words in commands]
    assert [code for code, *_ in found] == [2, 2, 2, 2, 0], found
    assert all("store.json" in said for _, _, said in found[:2])
    assert all("deep.yaml" in said for _, _, said in found[2:4])
    assert "doctor.json cannot be read" in found[4][1]
