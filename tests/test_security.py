"""What SECURITY.md and the threat model say is true: the named tests exist, the wheel has its list and no clock."""

from __future__ import annotations

import ast
import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from wheel_build.audit import main, read_answer
from wheel_build.backend import settle
from wheel_build.sbom import normal, pins, requirements, sbom, sbom_text

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/security.md").read_text("utf-8")


def names_of(path: Path) -> set[str]:
    """Return the tests of a file as pytest names them, without their parameters."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        owner = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {f"{owner}{one.name}" for one in inner if isinstance(one, ast.FunctionDef)}
    return {name for name in found if name.rpartition("::")[2].startswith("test_")}


def test_every_promise_names_a_test_that_exists():
    rows = re.findall(r"(?m)^\| (.+) \| (.+) \|$", PAGE)
    promises = [
        (said, held)
        for said, held in rows
        if said not in ("promise", "attack") and "---" not in said
    ]
    assert len(promises) > 20
    for said, held in promises:
        named = re.findall(r"`(test_\w+\.py)::([\w:]+)`", held)
        assert named, said
        for file, test in named:
            assert test in names_of(ROOT / "tests" / file), f"{file}::{test}"


def test_every_part_says_what_is_not_promised():
    for part in PAGE.split("\n## ")[1:]:
        assert "\nNot promised: " in part, part.splitlines()[0]


# -- the list of dependencies ----------------------------------------------------------------------


def test_the_list_has_every_dependency_with_the_version_that_is_tested():
    document = sbom(ROOT)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    listed = {one["name"]: one for one in document["components"]}
    assert listed["torch"]["scope"] == "required"
    assert listed["torch"]["version"] == pins(ROOT)["torch"]
    assert listed["pillow"]["scope"] == "optional"
    assert {"numpy", "h5py", "pyyaml", "rdkit", "fsspec"} <= set(listed) == set(requirements(ROOT))
    assert "pytest" not in listed  # for us, not for users
    # Every one that a plain install brings is pinned, so that the list has its version.
    required = {name for name, one in listed.items() if one["scope"] == "required"}
    assert required <= set(pins(ROOT))
    assert normal("PyYAML_x.y") == "pyyaml-x-y"


def test_without_a_database_the_audit_lists_versions_and_says_that_nothing_was_compared(
    capsys, monkeypatch
):
    monkeypatch.setattr("wheel_build.audit.compare", lambda: None)
    assert main() == 0
    out = capsys.readouterr().out
    assert re.search(rf"(?m)^torch +{re.escape(pins(ROOT)['torch'])} ", out)
    assert "compared with nothing" in out


def test_an_audit_that_compared_nothing_finds_nothing(capsys, monkeypatch):
    skipped = {"name": "torch", "skip_reason": "Dependency not found on PyPI"}
    sound = {"name": "numpy", "version": "2", "vulns": []}
    weak = {"name": "h5py", "version": "3", "vulns": [{"id": "PYSEC-1"}]}

    def audited(*found):
        answer = read_answer(json.dumps({"dependencies": found}))
        monkeypatch.setattr("wheel_build.audit.compare", lambda: answer)
        return main(), capsys.readouterr().out

    code, out = audited(skipped)
    assert code == 0
    assert "compared with nothing" in out
    code, out = audited(skipped, sound)
    assert code == 0
    assert "torch was not compared" in out
    assert "1 versions were compared, 0 have" in out
    code, out = audited(sound, weak)
    assert code == 1
    assert "h5py: PYSEC-1" in out


# -- the wheel -------------------------------------------------------------------------------------


def made_wheel(path: Path, names, date) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            file.writestr(zipfile.ZipInfo(name, date), f"content of {name}")
    return path


def test_a_settled_wheel_has_the_list_and_neither_order_nor_date(tmp_path, monkeypatch):
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    names = ["a/__init__.py", "a/b, c.txt", "a-1.dist-info/METADATA", "a-1.dist-info/RECORD"]
    one = made_wheel(tmp_path / "one.whl", names, (2020, 1, 2, 3, 4, 6))
    other = made_wheel(tmp_path / "other.whl", names[::-1], (2024, 5, 6, 7, 8, 10))
    for wheel in (one, other):
        settle(wheel, sbom_text(ROOT))
    assert one.read_bytes() == other.read_bytes()
    with zipfile.ZipFile(one) as file:
        assert json.loads(file.read("a-1.dist-info/sboms/sbom.cdx.json")) == sbom(ROOT)
        record = list(csv.reader(io.StringIO(file.read("a-1.dist-info/RECORD").decode())))
        assert {name for name, *_ in record} == set(file.namelist())
        sizes = {name: int(size) for name, digest, size in record if digest}
        assert sizes == {i.filename: i.file_size for i in file.infolist() if i.filename in sizes}
        assert {entry.date_time for entry in file.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    settle(one, sbom_text(ROOT))
    with zipfile.ZipFile(one) as file:
        assert {entry.date_time[:3] for entry in file.infolist()} == {(2023, 11, 14)}


BUILD = """
import os, sys
os.umask(int(sys.argv[2], 8))
from wheel_build import backend
backend.build_wheel(sys.argv[1])
"""


@pytest.mark.slow
def test_two_builds_of_one_checkout_are_equal_byte_by_byte(tmp_path):
    made = []
    for name, mask in (("one", "022"), ("another-place", "077")):
        copy = tmp_path / name / "checkout"
        kept = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / "src", copy / "src", ignore=kept)
        shutil.copytree(ROOT / "wheel_build", copy / "wheel_build", ignore=kept)
        for file in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
            shutil.copyfile(ROOT / file, copy / file)
        out = tmp_path / f"{name}-out"
        out.mkdir()
        subprocess.run(
            [sys.executable, "-c", BUILD, str(out), mask],
            cwd=copy, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(copy)},
        )  # fmt: skip
        made.append(next(out.glob("*.whl")))
    assert made[0].name == made[1].name
    assert made[0].read_bytes() == made[1].read_bytes()
    with zipfile.ZipFile(made[0]) as file:
        names = file.namelist()
    assert "stoker/py.typed" in names
    assert [name for name in names if name.endswith(".dist-info/sboms/sbom.cdx.json")]
