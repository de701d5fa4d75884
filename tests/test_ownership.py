"""Nothing is deleted, emptied or replaced unless a proof that stoker wrote names it."""

from __future__ import annotations

import ast
import json
import os
import shlex
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import stoker
from packing_makers import NumbersSource
from source_trees import nodes
from stoker import ownership
from stoker.cli.main import app
from stoker.errors import InputError, StoreError
from stoker.packing import PackOptions, pack
from stoker.report import RunLog
from stoker.runs.figures import write_plots
from stoker.sources.arrays import ArraysSource
from stoker.store.reader import open_store
from stoker.train.predict import write_predictions
from stoker.train.run_folder import RunLock

PACKAGE = Path(stoker.__file__).parent


# -- the rule: one module removes and replaces -----------------------------------------------------

_BANNED = {
    "rmtree", "unlink", "rmdir", "removedirs", "rename", "renames", "truncate", "ftruncate",
    "write_text", "write_bytes", "copyfile", "copy2", "copytree", "TemporaryDirectory",
    "NamedTemporaryFile", "mkdtemp", "mkstemp", "SpooledTemporaryFile", "savetxt", "tofile",
}  # fmt: skip


def offences(code: str) -> list[str]:
    """Calls that could remove or replace a file, whatever object they are made on."""
    found = []
    ours = {
        alias.asname or alias.name
        for node in nodes(code, ast.ImportFrom)
        if node.module == "stoker.ownership"
        for alias in node.names
    }
    for node in nodes(code, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        owner = getattr(getattr(node.func, "value", None), "id", "")
        if isinstance(node.func, ast.Name) and name in ours:
            continue
        plain = not node.keywords and len(node.args) == 1
        if (
            name in _BANNED
            or (name in {"remove", "move"} and owner in {"os", "shutil"})
            or (name == "replace" and (owner == "os" or (plain and owner != "dataclasses")))
            or (name in {"open", "File", "fdopen", "ZipFile"} and _truncates(node))
        ):
            found.append(f"line {node.lineno}: {name}")
        if any(isinstance(part, ast.Attribute) and part.attr == "O_TRUNC" for part in node.args):
            found.append(f"line {node.lineno}: O_TRUNC")
    return found


def _truncates(call: ast.Call) -> bool:
    modes = [*call.args[:2], *(word.value for word in call.keywords if word.arg == "mode")]
    texts = [mode.value for mode in modes if isinstance(mode, ast.Constant)]
    return any(
        isinstance(text, str) and set(text) <= set("rwab+t") and "w" in text for text in texts
    )


# `ranks.py` and `quantize.py` open nothing: a descriptor or memory is written to.
_ALLOWED = {"ownership.py": None, "packing/workers.py": ["fdopen"]}


def test_nothing_but_the_ownership_module_removes_or_replaces_files():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        allowed = _ALLOWED.get(place, [])
        if allowed is not None:
            said = [each for each in offences(path.read_text()) if each.split()[-1] not in allowed]
            found += [f"{place}: {each}" for each in said]
    assert not found, f"{found}: see stoker/ownership.py"


@pytest.mark.parametrize(
    "code",
    [
        "import shutil\nshutil.rmtree(x)",
        "path.unlink(missing_ok=True)",
        "import os\nos.remove(x)",
        "temporary.replace(path)",
        "os.replace(a, b)",
        "a.rename(b)",
        "open(x, 'w')",
        "path.open('wb')",
        "path.write_text('x')",
        "h5py.File(path, 'w')",
        "os.ftruncate(f, 0)",
        "import tempfile\ntempfile.TemporaryDirectory()",
        "os.open(x, os.O_TRUNC)",
        "from stoker.other import write_text\nwrite_text(a, b)",
    ],
)
def test_the_rule_can_fail(code):
    assert offences(code)


@pytest.mark.parametrize(
    "code",
    [
        "text.replace('a', 'b')",
        "replace(plan, tier=1)",
        "path.open('xb')",
        "path.open()",
        "from stoker.ownership import write_text\nwrite_text(a, b)",
    ],
)
def test_the_rule_lets_harmless_calls_be(code):
    assert not offences(code)


# -- outputs ---------------------------------------------------------------------------------------


def test_an_output_is_made_and_made_again_but_somebody_elses_file_is_not(tmp_path):
    page = tmp_path / "page.html"
    ownership.write_text(page, f"<!-- {ownership.SIGNATURE} --> one")
    ownership.write_text(page, f"<!-- {ownership.SIGNATURE} --> two")
    assert page.read_text().endswith("two")
    thesis = tmp_path / "thesis.html"
    thesis.write_text("mine")
    with pytest.raises(InputError, match="exists, and stoker did not write it"):
        ownership.write_text(thesis, "x")
    assert thesis.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "thesis.html"]


@pytest.mark.parametrize(
    "write",
    [
        lambda path: RunLock(path).acquire(),
        lambda path: stoker.pack_from([{"x": 1.0}], path),
        lambda path: write_predictions(path, [], {}),
        lambda path: write_plots([], path),
        lambda path: ownership.write_text(Path(path), "", is_ours=ownership.never),
        lambda path: ownership.claim_folder(Path(path), "demo", "the demo"),
    ],
)
def test_no_folder_is_called_like_the_home_folder(tmp_path, monkeypatch, write):
    """YAML and Python leave "~/runs" as it is; who cleans up by `rm -r ~` loses another folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    with pytest.raises(InputError) as raised:
        write("~/out.csv")
    assert raised.value.fix == "/home/me/out.csv"
    assert not list(tmp_path.iterdir())
    ownership.check_home("~$report.csv")
    (tmp_path / "~").mkdir()
    ownership.check_home("~/out.csv")


def test_a_failure_leaves_the_older_output_and_no_temporary_file(tmp_path):
    page = tmp_path / "page.html"
    ownership.write_text(page, ownership.SIGNATURE)

    def fail_after_writing() -> None:
        with ownership.writing(page) as temporary:
            ownership.write_new(temporary, "half")
            raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError):
        fail_after_writing()
    assert page.read_text() == ownership.SIGNATURE
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_file_that_somebody_made_meanwhile_is_not_replaced(tmp_path):
    page = tmp_path / "page.html"

    def write_late() -> None:
        with ownership.writing(page) as temporary:
            ownership.write_new(temporary, "ours")
            page.write_text("mine")

    with pytest.raises(InputError, match="did not write it"):
        write_late()
    assert page.read_text() == "mine"


def test_outputs_through_links_devices_and_folders(tmp_path):
    real = tmp_path / "real.html"
    ownership.write_text(real, ownership.SIGNATURE)
    link = tmp_path / "link.html"
    link.symlink_to(real)
    ownership.write_text(link, f"{ownership.SIGNATURE} new")
    assert link.is_symlink()
    assert real.read_text().endswith("new")
    thesis = tmp_path / "thesis"
    thesis.write_text("mine")
    link.unlink()
    link.symlink_to(thesis)
    with pytest.raises(InputError, match="did not write it"):
        ownership.write_text(link, "x")
    assert thesis.read_text() == "mine"
    with pytest.raises(InputError, match="is a folder"):
        ownership.write_text(tmp_path, "x")
    os.mkfifo(tmp_path / "pipe")
    for special in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(InputError, match="is not a plain file"):
            ownership.write_text(special, "x")


@given(name=st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1))
def test_temporary_names_are_known_by_their_form_and_nothing_else_is(name):
    target = Path("folder") / name
    if len(os.fsencode(name)) > 255 or name in {".", ".."}:
        return
    with ownership._temporary_beside(target) as temporary:
        pass
    assert ownership.is_temporary(temporary.name)
    assert len(os.fsencode(temporary.name)) <= 255
    assert ownership.is_temporary(name) == (
        name.endswith(".tmp")
        and name.startswith(".")
        and len(name.split(".")) > 3
        and len(name.split(".")[-2]) == 8
        and set(name.split(".")[-2]) <= set("0123456789abcdef")
    )


TABLE = "a,b,label\n" + "".join(f"{n},{n * 2},{n % 2}\n" for n in range(40))


@pytest.mark.parametrize("link", [False, True])
def test_inspect_never_writes_its_page_over_its_input(tmp_path, link):
    table, out = tmp_path / "x.csv", tmp_path / "x.csv"
    table.write_text(TABLE)
    if link:
        out = tmp_path / "page.html"
        out.symlink_to(table)
    done = CliRunner().invoke(app, ["inspect", str(table), "--html", str(out)])
    assert isinstance(done.exception, InputError)
    said = "is read by this command" if link else "has the ending of another format"
    assert said in str(done.exception)
    assert table.read_text() == TABLE


# -- stores ----------------------------------------------------------------------------------------


@pytest.fixture
def numbers(tmp_path) -> Path:
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "numbers.txt"
    file.write_text("source")
    return file


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def mount(*words: object) -> None:
    done = subprocess.run(["mount", *map(str, words)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("this user may not mount")


ONE = PackOptions(jobs=1)
AGAIN = PackOptions(jobs=1, force_recreate=True)


@pytest.mark.parametrize(
    "manifest",
    ["{}", "", "not json", '{"format_version": 1, "num_samples": 0}', '{"manifest_checksum": "0"}'],
)
def test_a_folder_that_merely_holds_a_store_json_is_refused(numbers, tmp_path, manifest):
    mine = tmp_path / "project"
    (mine / "src").mkdir(parents=True)
    (mine / "thesis.tex").write_text("x")
    (mine / "src" / "main.py").write_text("x")
    (mine / "store.json").write_text(manifest)
    before = tree(mine)
    for options in (ONE, AGAIN):
        with pytest.raises(InputError, match="other things in it"):
            pack(NumbersSource(numbers), mine, options)
    assert tree(mine) == before
    assert not (tmp_path / "project.partial").exists()


@pytest.mark.parametrize("kept", [("store.json",), ("store.json", "shard-00000.h5")])
def test_a_file_in_the_place_of_the_mark_is_not_replaced_beside_a_true_manifest(
    numbers, tmp_path, kept
):
    """Found by the fuzz (files of the user's, seed 1, number 6174)."""
    store = tmp_path / "store"
    pack(NumbersSource(numbers), store, ONE)
    for path in store.iterdir():
        if path.name not in kept:
            path.unlink()
    (store / ".stoker").write_bytes(b"mine")
    before = tree(store)
    for options in (ONE, AGAIN):
        with pytest.raises(InputError, match=r"holds '\.stoker', which stoker did not write"):
            pack(NumbersSource(numbers), store, options)
    assert tree(store) == before


@pytest.mark.parametrize(
    "name", ["notes.txt", "runs/step-000000001.pt", "shard-99999.h5", ".hidden", "empty/"]
)
@pytest.mark.parametrize("damage", [False, True])
def test_what_somebody_put_into_a_store_is_refused_by_name_before_any_work(
    numbers, tmp_path, name, damage
):
    out = tmp_path / "s"
    pack(NumbersSource(numbers), out, ONE)
    place = out / name
    place.parent.mkdir(exist_ok=True)
    place.mkdir() if name.endswith("/") else place.write_text("mine")
    if damage:
        (out / "store.json").write_text("{")
    before = tree(out)
    built = (numbers.parent / "built.log").read_text()
    first = name.split("/")[0]
    with pytest.raises(InputError, match=f"holds '{first}/?', which stoker did not write"):
        pack(NumbersSource(numbers), out, AGAIN)
    assert tree(out) == before
    assert (numbers.parent / "built.log").read_text() == built
    assert pack(NumbersSource(numbers), out, ONE).reused != damage if not damage else True


def test_a_store_of_an_older_version_has_no_mark_and_is_replaced_all_the_same(numbers, tmp_path):
    out = tmp_path / "s"
    pack(NumbersSource(numbers), out, ONE)
    (out / ownership.MARK_NAME).unlink()
    assert not pack(NumbersSource(numbers), out, AGAIN).reused
    assert (out / ownership.MARK_NAME).exists()


@pytest.mark.parametrize("name", ["shard-00000.h5", "refused.jsonl", "samples.html"])
@pytest.mark.parametrize("content", ["mine", '{"mine": 1}\n', "of the same size", "a link"])
def test_a_file_of_somebody_beside_a_copied_manifest_is_not_replaced(
    numbers, tmp_path, name, content
):
    """Found by the fuzz (files of the user's, seed 1, number 8365)."""
    pack(NumbersSource(numbers), tmp_path / "s", ONE)
    mine = tmp_path / "mine"
    mine.mkdir()
    shutil.copy(tmp_path / "s" / "store.json", mine)
    if content == "a link":
        (mine / name).symlink_to(numbers)
    elif content == "of the same size":
        (mine / name).write_text("m" * (tmp_path / "s" / "shard-00000.h5").stat().st_size)
    else:
        (mine / name).write_text(content)
    before = tree(mine)
    with pytest.raises(InputError, match=f"holds '{name}', which .* the content is not"):
        pack(NumbersSource(numbers), mine, AGAIN)
    assert tree(mine) == before
    assert (mine / name).is_symlink() == (content == "a link")


def test_a_page_of_somebody_in_a_store_that_was_made_without_one_is_not_removed(numbers, tmp_path):
    out = tmp_path / "s"
    pack(NumbersSource(numbers), out, ONE)
    (out / "samples.html").write_text("<h1>mine</h1>")
    before = tree(out)
    with pytest.raises(InputError, match=r"holds 'samples\.html', which stoker did not write"):
        pack(NumbersSource(numbers), out, AGAIN)
    assert tree(out) == before


def test_the_mark_vouches_for_a_damaged_shard(numbers, tmp_path):
    out = tmp_path / "s"
    pack(NumbersSource(numbers), out, ONE)
    (out / "shard-00000.h5").write_bytes(b"damaged")
    assert not pack(NumbersSource(numbers), out, ONE).reused
    with open_store(out) as store:
        assert not store.verify().problems


@pytest.mark.parametrize("name", ["thesis.tex", "job.json.bak", "built/shard-00000.h5", "sub/x"])
def test_a_users_own_partial_folder_is_neither_emptied_nor_used(numbers, tmp_path, name):
    mine = tmp_path / "data.partial"
    place = mine / name
    place.parent.mkdir(parents=True)
    place.write_text("mine")
    before = tree(mine)
    with pytest.raises(InputError, match=r"data\.partial holds .*, which stoker did not write"):
        pack(NumbersSource(numbers), tmp_path / "data", ONE)
    assert tree(mine) == before


def test_what_somebody_put_into_the_work_folder_stays(numbers, tmp_path):
    with pytest.raises(RuntimeError):
        pack(NumbersSource(numbers, trouble=((1002, "raise"),)), tmp_path / "s", ONE)
    note = tmp_path / "s.partial" / "note.txt"
    note.write_text("mine")
    with pytest.raises(InputError, match=r"s\.partial holds 'note\.txt', which stoker did not"):
        pack(NumbersSource(numbers), tmp_path / "s", ONE)
    assert note.read_text() == "mine"
    note.unlink()
    pack(NumbersSource(numbers), tmp_path / "s", ONE)
    assert not (tmp_path / "s.partial").exists()


def test_a_file_that_comes_into_the_work_folder_during_a_pack_stays_and_is_told(numbers, tmp_path):
    from stoker.packing.work_folder import WorkFolder

    said: list[str] = []
    clear = WorkFolder._clear

    def clear_late(self, keep=()):
        if not keep:
            (self.folder / "late.txt").write_text("mine")
        return clear(self, keep)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkFolder, "_clear", clear_late)

        class Told:
            start = advance = staticmethod(lambda *_: None)
            say = staticmethod(said.append)

        pack(NumbersSource(numbers), tmp_path / "s", ONE, Told())
    assert (tmp_path / "s.partial" / "late.txt").read_text() == "mine"
    assert any("late.txt" in line for line in said)
    assert len(list((tmp_path / "s.partial").iterdir())) == 2  # the file, and the mark


def test_links_in_our_folders_are_removed_as_links(numbers, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("x")
    with pytest.raises(RuntimeError):
        pack(NumbersSource(numbers, trouble=((1002, "raise"),)), tmp_path / "s", ONE)
    work = tmp_path / "s.partial"
    (work / "scratch" / "link").symlink_to(precious)
    (stage,) = work.glob("built-*")
    (stage / "part-00077.json").symlink_to(precious / "thesis.tex")
    pack(NumbersSource(numbers, option="b"), tmp_path / "s", ONE)
    assert (precious / "thesis.tex").read_text() == "x"


def test_a_link_as_out_is_followed_and_stays(numbers, tmp_path):
    disk = tmp_path / "other-disk"
    disk.mkdir()
    (tmp_path / "s").symlink_to(disk / "store")
    with pytest.raises(InputError, match=r"is a link to .*, which does not exist") as caught:
        pack(NumbersSource(numbers), tmp_path / "s", ONE)
    subprocess.run(shlex.split(caught.value.fix), check=True)
    for options in (ONE, AGAIN):
        pack(NumbersSource(numbers), tmp_path / "s", options)
        assert (tmp_path / "s").is_symlink()
        assert open_store(tmp_path / "s").num_samples == 15
    assert sorted(path.name for path in disk.iterdir()) == ["store"]


def test_a_work_folder_that_is_a_link_is_refused(numbers, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "s.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"s\.partial was not made by stoker"):
        pack(NumbersSource(numbers), tmp_path / "s", ONE)


def test_a_mount_point_as_out_is_refused_before_any_work(numbers, tmp_path):
    out = tmp_path / "mounted"
    out.mkdir()
    mount("-t", "tmpfs", "none", out)
    try:
        with pytest.raises(InputError, match="is a mount point") as caught:
            pack(NumbersSource(numbers), out, ONE)
        assert not (numbers.parent / "built.log").exists()
        advised = Path(caught.value.fix.removeprefix("OUT "))
        pack(NumbersSource(numbers), advised, ONE)
        pack(NumbersSource(numbers), advised, AGAIN)
        assert open_store(advised).num_samples == 15
    finally:
        subprocess.run(["umount", "-l", out], check=True)


def test_a_folder_that_is_bound_elsewhere_is_a_mount_point_too(numbers, tmp_path):
    out, other = tmp_path / "bound with space", tmp_path / "other"
    out.mkdir()
    other.mkdir()
    mount("--bind", other, out)
    try:
        with pytest.raises(InputError, match="is a mount point"):
            pack(NumbersSource(numbers), out, ONE)
    finally:
        subprocess.run(["umount", "-l", out], check=True)


def test_a_disk_mounted_inside_a_folder_of_ours_is_not_entered(numbers, tmp_path):
    with pytest.raises(RuntimeError):
        pack(NumbersSource(numbers, trouble=((1002, "raise"),)), tmp_path / "s", ONE)
    inside = tmp_path / "s.partial" / "scratch" / "disk"
    inside.mkdir()
    mount("-t", "tmpfs", "none", inside)
    try:
        (inside / "thesis.tex").write_text("x")
        with pytest.raises(InputError, match="scratch/disk/"):
            pack(NumbersSource(numbers), tmp_path / "s", ONE)
        assert (inside / "thesis.tex").exists()
    finally:
        subprocess.run(["umount", "-l", inside], check=True)


@pytest.mark.parametrize(
    ("inputs", "out", "words"),
    [
        (["data/x.npy"], "data/x.npy", "is a file|is .*x.npy, which is read"),
        (["data"], "data", "is .*data, which is read"),
        (["data"], "data/store", "lies in .*data, which is read"),
        (["data"], "data/deep/er/store", "lies in .*data, which is read"),
        (["link-to-data"], "data/store", "lies in .*link-to-data, which is read"),
        (["data"], "link-to-data/store", "lies in .*data, which is read"),
        (["out/in.npy"], "out", "holds .*in.npy, which is read"),
        (["s.partial/in.npy"], "s", "holds .*in.npy, which is read"),
    ],
)
def test_an_out_that_is_or_holds_or_lies_in_an_input_is_refused(tmp_path, inputs, out, words):
    for folder in ("data", "out", "s.partial"):
        (tmp_path / folder).mkdir()
    (tmp_path / "link-to-data").symlink_to("data")
    for place in ("data/x.npy", "out/in.npy", "s.partial/in.npy"):
        np.save(tmp_path / place, np.arange(6.0).reshape(3, 2))
    before = tree(tmp_path)

    class Read(ArraysSource):
        def files(self):
            return [tmp_path / name for name in inputs]

    with pytest.raises(InputError, match=words):
        pack(Read((tmp_path / "data" / "x.npy",)), tmp_path / out, AGAIN)
    assert tree(tmp_path) == before


def test_a_pack_into_the_store_that_it_reads_is_refused(numbers, tmp_path):
    pack(NumbersSource(numbers), tmp_path / "s", ONE)
    before = tree(tmp_path / "s")
    shard = tmp_path / "s" / "shard-00000.h5"
    with pytest.raises(InputError, match=r"holds .*shard-00000\.h5, which is read"):
        pack(ArraysSource((shard,)), tmp_path / "s", ONE)
    assert tree(tmp_path / "s") == before


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["my own log\nline two", "{}\n", '{"time" is not ours'])
def test_a_run_log_that_is_not_ours_is_refused_and_left(tmp_path, content):
    log = tmp_path / "run.jsonl"
    log.write_text(content)
    with pytest.raises(InputError, match=r"run\.jsonl was not made by stoker"):
        RunLog(log)
    assert log.read_text() == content


@pytest.mark.parametrize("name", ["run.jsonl", "lock"])
def test_logs_and_locks_do_not_follow_links(tmp_path, name):
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(thesis)
    with pytest.raises(InputError, match=f"{name} was not made by stoker"):
        RunLog(run / name) if name == "run.jsonl" else RunLock(run).acquire()
    assert thesis.read_text() == "mine"


def test_a_file_called_lock_is_not_emptied(tmp_path):
    (tmp_path / "lock").write_text("the number of my bicycle lock")
    with pytest.raises(InputError, match="lock was not made by stoker"):
        RunLock(tmp_path).acquire()
    assert "bicycle" in (tmp_path / "lock").read_text()
    (tmp_path / "lock").unlink()
    for _ in range(2):
        RunLock(tmp_path).acquire().release()


def test_a_demo_goes_into_a_folder_of_its_own(tmp_path):
    from stoker.demo.story import run_demo

    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match=r"holds 'thesis\.tex', which stoker did not write"):
        run_demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


# -- temporary folders -----------------------------------------------------------------------------


def test_temporary_folders_are_gone_and_only_a_marked_one_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ownership.temporary_folder() as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "x").write_text("x")
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    other = tmp_path / "stoker-other"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    ownership.remove_leftover(str(other), "0123")
    mark = {"kind": "temporary", "id": "somebody else's"}
    (other / ownership.MARK_NAME).write_text(json.dumps(mark))
    ownership.remove_leftover(str(other), "0123")
    ownership.remove_leftover(str(other / "thesis.tex"), "0123")
    assert (other / "thesis.tex").exists()


def test_marks_that_are_links_or_nonsense_are_no_marks(tmp_path):
    for text in ("", "[]", "{}", "[" * 100_000, '{"kind": "store"}', "\0" * 100):
        (tmp_path / ownership.MARK_NAME).write_text(text)
        assert ownership.read_mark(tmp_path, "store") is None
    (tmp_path / ownership.MARK_NAME).unlink()
    ownership.write_mark(tmp_path, ownership.Mark("store", "1"))
    assert ownership.read_mark(tmp_path, "store") == ownership.Mark("store", "1")
    assert ownership.read_mark(tmp_path, "pack") is None
    real = (tmp_path / ownership.MARK_NAME).rename(tmp_path / "real")
    (tmp_path / ownership.MARK_NAME).symlink_to(real)
    assert ownership.read_mark(tmp_path, "store") is None
    with pytest.raises((InputError, StoreError)):
        ownership.write_mark(tmp_path, ownership.Mark("pack", "2"))


def test_an_input_that_links_to_itself_is_the_users_mistake(tmp_path):
    from stoker.errors import StokerError
    from stoker.packing import PackOptions, pack
    from stoker.sources.arrays import ArraysSource

    (tmp_path / "self.h5").symlink_to("self.h5")
    with pytest.raises(StokerError, match=r"self\.h5"):
        pack(ArraysSource((tmp_path / "self.h5",)), tmp_path / "out", PackOptions(jobs=1))
    assert not (tmp_path / "out").exists()


def test_who_marks_a_folder_at_once_agrees(tmp_path, monkeypatch):
    """Each of three finds no mark at first; the last to write must not replace what the others use by then."""
    waiting, looks, read_mark = threading.Barrier(3), threading.local(), ownership.read_mark

    def look(folder, kind):
        found = read_mark(folder, kind)
        if not getattr(looks, "done", False):
            looks.done = True
            waiting.wait(60)  # all have found nothing before one writes
        return found

    monkeypatch.setattr(ownership, "read_mark", look)
    with ThreadPoolExecutor(3) as pool:
        marks = list(pool.map(lambda _: ownership.mark_once(tmp_path, "cache").id, range(3)))
    assert len(set(marks)) == 1
    assert read_mark(tmp_path, "cache").id == marks[0]
