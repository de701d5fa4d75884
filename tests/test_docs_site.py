"""The documentation site: what is made of code, results and files says what they say, and links lead somewhere."""

from __future__ import annotations

import importlib.util
import inspect
import json
import posixpath
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import docs_build.site
import pytest
import yaml
from docs_build.blocks import prose
from docs_build.markdown import to_markdown
from docs_build.measures import MEASURES
from docs_build.pages import (
    LANGUAGES,
    filled_nav,
    generated_pages,
    published_files,
    relinked,
    symptoms,
    written_pages,
)
from docs_build.reference import anchor, find_home, read_package
from docs_build.results import Row, benchmarks_page, defaults_section, number_words, rows_of
from docs_build.verbs import EXIT_CODES, command_tree, leaves, subcommands, verb_pages

import stoker

ROOT = Path(__file__).resolve().parent.parent
RESULTS = sorted((ROOT / "benchmarks/results").glob("*.json"))


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """All pages as zensical gets them."""
    written = {path: relinked(text, f"docs/{path}") for path, text in written_pages().items()}
    return written | generated_pages()


# -- commands ----------------------------------------------------------------------------------------


def test_every_verb_has_a_page_with_every_option(pages):
    tree = command_tree()
    assert len(subcommands(tree)) == 15
    for words, command in leaves(tree):
        page = pages[f"verbs/{words[0]}.md"]
        name = f"stoker {' '.join(words)}"
        assert f"# {name}\n" in page
        part = page.partition(f"# {name}\n")[2].partition("\n## ")[0]
        assert f"```text\n{name} [OPTIONS]" in part
        for param in command.params:
            for option in param.opts if param.param_type_name == "option" else ():
                assert re.search(rf"^\| `[^`]*{re.escape(option)}\b", part, re.MULTILINE), (
                    name,
                    option,
                )
            if param.help:
                assert " ".join(param.help.replace("|", "\\|").split())[:40] in part


def test_defaults_and_ranges_are_those_of_the_parser(pages):
    page = pages["verbs/demo.md"]
    assert "| `9` | Weeks of one-minute bars to make. Allowed: `4<=x<=520`. |" in page
    assert "| `stoker-demo` |" in page
    assert "| required |" in pages["verbs/verify.md"]


def test_every_exit_code_has_words(pages):
    import stoker.errors

    codes = {value for name, value in vars(stoker.errors).items() if name.startswith("EXIT_")}
    assert set(EXIT_CODES) == codes
    for verb in subcommands(command_tree()):
        for code, words in EXIT_CODES.items():
            assert f"| {code} | {words} |" in pages[f"verbs/{verb}.md"]


def test_a_verb_is_linked_with_the_pages_that_use_it():
    made = verb_pages({"a.md": "# A\n`stoker plan x`", "b.md": "# B\nstoker plan, stoker plan"})
    assert "[B](../b.md) · [A](../a.md)" in made["verbs/plan.md"]
    assert "Read more" not in made["verbs/train.md"]


# -- the doctor --------------------------------------------------------------------------------------


def test_every_finding_has_its_anchor_and_its_page(pages):
    from stoker.doctor.findings import explanations
    from stoker.doctor.rules import FINDING_NAMES

    doctor = pages["doctor.md"]
    assert set(explanations()) == set(symptoms(doctor)) == set(FINDING_NAMES)
    for name in FINDING_NAMES:
        assert name in anchors((ROOT / "docs/doctor.md").read_text(encoding="utf-8"))
        page = pages[f"symptoms/{name}.md"]
        assert page.startswith(f"# {name}\n")
        assert all(words in page for words in symptoms(doctor)[name])
        assert f"({name}.md)" in pages["symptoms/index.md"]


# -- benchmarks --------------------------------------------------------------------------------------


def test_every_result_is_on_the_page_and_on_the_site(pages):
    page = pages["benchmarks.md"]
    assert RESULTS
    for path in RESULTS:
        assert f"{{ #{path.stem} }}" in page
        assert f"(results/{path.name})" in page
        assert published_files()[f"results/{path.name}"] == path.read_bytes()


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_places_of_the_figures_are_right(path, pages):
    document = json.loads(path.read_text())
    rows = rows_of(document)
    part = pages["benchmarks.md"].partition(f"{{ #{path.stem} }}")[2].partition("\n## ")[0]
    if document["benchmark"] == "defaults":
        assert "(#recipe-defaults)" in part
        return
    if document["benchmark"] not in (*MEASURES, "augment"):
        assert part.count("\n| ") > 3, "an unknown result is shown whole"
        return
    assert rows
    on_gpu = bool(document["machine"]["probe"]["gpus"])
    for row in rows:
        assert row.ours is not None, row.what
        assert row.what in part
        figures = [*row.peers.items(), *([row.limit] if row.limit else [])]
        for name, value in figures:
            only_there = name in ("the graph alone", "torch's own graph of the step")
            assert value is not None or name == "DALI" or (only_there and not on_gpu), row


def test_ratios_are_those_of_the_files():
    feed = json.loads((ROOT / "benchmarks/results/feed-nvidia-h200.json").read_text())
    row = rows_of(feed)[0]
    assert row.times(row.peers["pinning each chunk"]) == pytest.approx(
        feed["result"]["times_document"]
    )
    slower = Row("x", "s", 2.0, {"peer": 1.0}, None, less_is_better=True)
    assert slower.times(1.0) == 0.5
    assert slower.times(None) is None


NEW_RESULT = {
    "few": {"a": 0.5},
    "words": "a|b",
    "nothing": None,
    "by_ranks": {"1": {"read_bytes": 4096, "fine": True}, "2": {"read_bytes": 2048, "fine": True}},
}


def test_losses_are_shown_and_unknown_results_too(tmp_path):
    machine = json.loads(RESULTS[0].read_text())["machine"] | {"date": "2026-11-16"}
    result = {"records_per_second": {"stoker, gzip": 50.0, "matchms": 100.0}}
    for name, value in (("msp", result), ("new", NEW_RESULT)):
        document = {"benchmark": name, "machine": machine, "result": value}
        (tmp_path / f"{name}-x.json").write_text(json.dumps(document))
    page = benchmarks_page(tmp_path, "# Benchmarks\n\ntext\n\n## How\n\nread")
    assert (
        "| 50.0&nbsp;records/s | **0.500 ×** matchms (100&nbsp;records/s)<br>n/a: a plain line loop |"
        in page
    )
    assert "| few, a | 0.500 |\n| words | a\\|b |\n| nothing | n/a |" in page
    assert (
        "by ranks:\n\n|  | read bytes | fine |\n|---|---|---|\n| 1 | 4,096 | True |\n| 2 | 2,048 | True |"
        in page
    )
    assert "Measured on 2026-11-16" in page
    assert page.endswith("## How\n\nread")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0"),
        (712082.7, "712,083"),
        (99.96, "100.0"),
        (48.37, "48.4"),
        (0.0645, "0.0645"),
        (1.0, "1.00"),
    ],
)
def test_numbers_in_words(value, words):
    assert number_words(value) == words


# -- the API reference -------------------------------------------------------------------------------


def test_every_public_name_is_in_the_reference_with_its_real_signature(pages):
    """Two ways, one answer: the source read as text, and the imported object."""
    package = read_package(ROOT / "src/stoker")
    checked = 0
    for name in stoker.__all__:
        home = find_home(package, "stoker", name)
        assert home is not None
        room = pages[f"api/{home.path.split('.')[1]}.md"]
        mark = f"### {home.name} {{ #{anchor(home.path)} }}"
        assert mark in room
        assert f"#{anchor(home.path)})" in pages["api/index.md"]
        thing = getattr(stoker, name)
        if inspect.isfunction(thing):
            shown = room.partition(mark)[2].partition("```python\n")[2].partition("\n```")[0]
            signature = inspect.signature(eval(f"lambda {parameters_of(shown)}: 0"))
            assert list(signature.parameters) == list(inspect.signature(thing).parameters), name
            checked += 1
    assert checked >= 8


def parameters_of(shown: str) -> str:
    """The parameters' names of a written signature, with `=0` for every default."""
    import ast

    tree = ast.parse(f"def {shown}: ...").body[0]
    assert isinstance(tree, ast.FunctionDef)
    for one in [*tree.args.args, *tree.args.kwonlyargs, tree.args.vararg, tree.args.kwarg]:
        if one is not None:
            one.annotation = None
    tree.args.defaults = [ast.Constant(0) for _ in tree.args.defaults]
    tree.args.kw_defaults = [one and ast.Constant(0) for one in tree.args.kw_defaults]
    return ast.unparse(tree.args)


def test_names_that_the_docs_use_are_in_the_reference(pages):
    assert "### plan_store_lanes" in pages["api/loader.md"]
    assert "### read_run_log" in pages["api/report.md"]
    assert "#### Loader.state_dict" in pages["api/loader.md"]


def test_docstrings_become_markdown():
    doc = """Read `a<b>` and *this* [1].

    code = 1

Args:
    path: A file,
        or a folder.
    out: 3 < 4.

Returns:
    What is there.
"""
    assert to_markdown(doc) == (
        "Read `a<b>` and \\*this\\* \\[1\\].\n\n```text\ncode = 1\n```\n\n**Args**\n\n"
        "- `path`: A file, or a folder.\n- `out`: 3 &lt; 4.\n\n**Returns**\n\n- What is there."
    )


# -- links and navigation ----------------------------------------------------------------------------


def anchors(page: str) -> set[str]:
    """The places of a page that a link can lead to."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page, flags=re.DOTALL | re.MULTILINE)
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        given = re.search(r"\{ #(\S+) \}$", heading)
        words = re.sub(r"[^\w\s-]", "", heading.replace("`", "").lower())
        found.add(given[1] if given else re.sub(r"\s", "-", words.strip()))
    return found


def test_every_link_leads_to_a_page_and_a_place(pages):
    files = set(pages) | set(published_files())
    folder = ROOT / "docs"
    files |= {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")}
    wrong, seen = [], 0
    for page, text in pages.items():
        for link in re.findall(r"\]\(([^()\s]+)\)", prose(text)):
            target, _, place = link.partition("#")
            there = (
                posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
                if target
                else page
            )
            seen += 1
            if there not in files or (place and place not in anchors(pages[there])):
                wrong.append(f"{page}: {link}")
    assert not wrong, "\n".join(wrong)
    assert seen > 400


def site_config() -> dict:
    class Plain(yaml.SafeLoader):
        pass

    Plain.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
    return yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Plain)


def places(nav) -> list[str]:
    found = []
    for entry in nav:
        for below in entry.values() if isinstance(entry, dict) else [entry]:
            found += places(below) if isinstance(below, list) else [below]
    return found


def test_every_page_has_its_place_in_the_navigation(pages):
    filled = places(filled_nav(site_config()["nav"], pages))
    assert len(filled) == len(set(filled))
    assert set(filled) == set(pages)


def test_the_navigation_takes_folders_and_what_is_left():
    made = {
        "a/index.md": "# A",
        "a/x.md": "# stoker x",
        "b.md": "# B",
        "c.md": "# C",
        "d.md": "# D",
    }
    nav = ["b.md", {"More": ["*"]}, {"A": ["a/*"]}]
    assert filled_nav(nav, made) == [
        "b.md",
        {"More": ["c.md", "d.md"]},
        {"A": ["a/index.md", {"x": "a/x.md"}]},
    ]


def test_the_pictures_stand_alone_and_suit_light_and_dark():
    pictures = sorted((ROOT / "docs/images/concepts").glob("*.svg"))
    assert len(pictures) == 5
    concepts = (ROOT / "docs/concepts.md").read_text()
    for picture in pictures:
        text = picture.read_text()
        root = ElementTree.fromstring(text)
        space = "{http://www.w3.org/2000/svg}"
        assert root.find(f"{space}title").text, "what a screen reader says"
        assert "prefers-color-scheme:dark" in text
        assert not re.search(r"(href|src|url)=|@import|url\((?!#)", text)
        assert f"](images/concepts/{picture.name})" in concepts


# -- figures in prose --------------------------------------------------------------------------------

FIGURES = re.compile(r"<!-- figures: (\S+)\n(.*?)-->", re.DOTALL)


def figure(result, keys: list[str]) -> float:
    for key in keys:
        if "rows" in result and key not in result:
            result = next(row for row in result["rows"] if row["name"] == key)["ms"]
        else:
            result = result[key]
    return float(result)


@pytest.mark.parametrize("name", ["concepts.md", "faq.md"])
def test_figures_of_a_page_are_those_of_the_results(name):
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    shown = " ".join(prose(page).split())
    checked = 0
    for file, lines in FIGURES.findall(page):
        result = json.loads((ROOT / "benchmarks/results" / file).read_text())["result"]
        for line in lines.strip().splitlines():
            place, _, words = line.partition(" = ")
            place, _, divisor = place.partition(" / ")
            place, _, factor = place.partition(" * ")
            value = figure(result, place.split("/")) * float(factor or 1) / float(divisor or 1)
            number = re.match(r"[\d,.]*\d", words)[0].replace(",", "")
            digits = len(number.partition(".")[2])
            assert f"{value:.{digits}f}" == number, line
            assert words in shown, f"{words!r} is not in the text"
            checked += 1
    assert checked >= 7


def test_every_corrected_claim_leads_to_its_answer():
    """Claims that the requirements mark as wrong, by their numbers: each has a row with a link to its answer."""
    page = (ROOT / "docs/documents.md").read_text(encoding="utf-8")
    part = page.partition("## Claims that measurements correct\n")[2]
    rows = [line for line in part.splitlines() if line.startswith("| S") and "](faq.md#" in line]
    wrong = "S0-8 S0-11 S0-14 S0-15 S0-17 S0-18 S0-19 S0-27 S1-19 S2-11 S3-2 S3-6 S3-8 S3-13 S4-5 S4-6 S4-7 S4-8 S4-9"
    found = {code for row in rows for code in re.findall(r"S\d-\d+", row.split("|")[1])}
    assert set(wrong.split()) - found == set()


def numbers_in(value) -> list[float]:
    """Every number of a result file."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in numbers_in(item)]
    return [float(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


@pytest.mark.parametrize(("page", "least"), [("README.md", 5), ("benchmarks/README.md", 10)])
def test_figures_of_a_table_stand_in_the_file_that_its_row_cites(page, least):
    rows = 0
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        file = re.search(r"results/([\w.-]+\.json)\)", line)
        if not (file and line.startswith("| ")):
            continue
        known = numbers_in(
            json.loads((ROOT / "benchmarks/results" / file[1]).read_text())["result"]
        )
        cells = " ".join(line.split("|")[2:-1]).replace(file[0], "")
        cells = re.sub(r"v2|\d+ workers|\d (x86|ARM) cores|H200|-2-cores", "", cells)
        figures = re.findall(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?", cells)
        assert len(figures) >= 2, line
        for figure in figures:
            plain = figure.replace(",", "")
            digits = len(plain.partition(".")[2])
            assert any(f"{one:.{digits}f}" == plain for one in known), f"{figure} in: {line}"
        rows += 1
    assert rows >= least


# -- the documents' numbers ----------------------------------------------------------------------------

ITEMS = {"S0": 28, "S1": 20, "S2": 15, "S3": 14, "S4": 9}


def codes_of(text: str) -> set[str]:
    """Every item that a text names, ranges such as S0-1 to S0-3 filled."""
    found = set(re.findall(r"S[0-4]-\d+", text))
    for document, low, high in re.findall(r"(S[0-4])-(\d+) to S[0-4]-(\d+)", text):
        found |= {f"{document}-{number}" for number in range(int(low), int(high) + 1)}
    return found


def test_one_page_tells_what_every_item_of_the_documents_became():
    page = (ROOT / "docs/documents.md").read_text(encoding="utf-8")
    every = {f"{name}-{n}" for name, last in ITEMS.items() for n in range(1, last + 1)}
    assert every - codes_of(page) == {"S0-28"}, "references to other documents became nothing"


def test_no_other_page_has_numbers_of_the_documents(pages):
    from stoker.config.tree import key_schemas

    texts = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("README*.md")}
    texts["benchmarks/README.md"] = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    texts |= {path: text for path, text in written_pages().items() if path != "documents.md"}
    for leaf in key_schemas().values():  # the page repeats the keys' own words
        texts["config.md"] = texts["config.md"].replace(leaf["description"], "")
    wrong = {path: sorted(codes) for path, text in texts.items() if (codes := codes_of(text))}
    assert wrong == {}
    assert codes_of("as in S1-2 to S1-4") == {"S1-2", "S1-3", "S1-4"}


PRIVATE = re.compile(
    r"\b(doors?|rungs?|footing|crew|foreman|workshop|lookout|handful)\b", re.IGNORECASE
)


def test_pages_use_the_words_of_the_field():
    """Words of a private dialect that newcomers met; names of files between backticks do not count."""
    texts = written_pages() | {"README.md": (ROOT / "README.md").read_text(encoding="utf-8")}
    found = {
        path: words
        for path, text in texts.items()
        if (words := PRIVATE.findall(re.sub(r"`[^`]*`", "", prose(text))))
    }
    assert found == {}
    assert PRIVATE.findall("three doors, one Rung") == ["doors", "Rung"]


# -- the site itself ---------------------------------------------------------------------------------


def with_short_tables(page: str) -> str:
    """Leave 30 lines of every table: the results, row after row alike, are more than half of the site's text."""
    kept, row = [], 0
    for line in page.splitlines(keepends=True):
        row = row + 1 if line.startswith("|") else 0
        if row <= 30:
            kept.append(line)
    return "".join(kept)


@pytest.fixture(scope="module")
def site(tmp_path_factory, pages) -> Path:
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("zensical is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("built") / "site"
    short = {path: with_short_tables(text) for path, text in pages.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(docs_build.site, "generated_pages", lambda: short)
        assert docs_build.site.build(folder) == 0
    return folder


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_fetches_nothing(site, pages):
    for page in pages:
        text = (site / page.replace("README", "index")).with_suffix(".html").read_text("utf-8")
        fetched = re.findall(
            r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"?([^\"\s>]+)", text
        )
        assert fetched
        assert [one for one in fetched if re.match(r"(https?:)?//", one)] == [], page


@pytest.mark.slow
def test_translated_pages_say_their_language(site):
    assert '<html lang="en"' in (site / "index.html").read_text("utf-8")
    for code in LANGUAGES:
        assert f'<html lang="{code}"' in (site / code / "quickstart.html").read_text("utf-8")


def test_default_runs_stand_in_one_table(tmp_path):
    assert defaults_section(tmp_path) == []
    row = {
        "data": "flows", "minutes": 2.34, "cpu_minutes": 2.0, "epochs": 40, "metric": "macro_f1", "value": 0.93,
        "interval": [0.82, 0.97], "baseline": "boosted trees", "baseline_value": 0.975, "worth": "worse",
    }  # fmt: skip
    ahead = {"data": "bars", "projected": True, "minutes": 75.0, "cpu_minutes": 130.0, "epochs": 20,
             "epoch_seconds": 225.0}  # fmt: skip
    bars = {"data": "bars", "minutes": 1.2, "epochs": 9, "metric": "mae", "more_is_better": False, "value": 3.0,
            "interval": [], "baseline": "last value", "baseline_value": 3.1, "worth": "better"}  # fmt: skip
    for host, result in (("cpu", {"tabular": row, "forex": ahead}), ("gpu", {"forex": bars})):
        document = {"benchmark": "defaults", "machine": {"host": host}, "result": result}
        (tmp_path / f"defaults-{host}.json").write_text(json.dumps(document))
    lines = [line for line in defaults_section(tmp_path) if line.startswith("|")]
    assert lines[0].endswith("| verdict | minutes, cpu | minutes, gpu |")
    assert lines[2:] == [
        (
            "| tabular | flows | macro_f1 | 0.93 (0.82 to 0.97) | boosted trees 0.975 | **not worth training** "
            "| 2.34 (2.00), 40 epochs | n/a |"
        ),
        (
            "| forex | bars | mae, less is better | 3 | last value 3.1 | better "
            "| *projected* 75.0 (130): 20 epochs of 225 s | 1.20, 9 epochs |"
        ),
    ]


def test_the_published_default_runs_are_in_the_table():
    """Five recipes; a run that is published has its metric, its baseline and its minutes there."""
    folder = ROOT / "benchmarks/results"
    shown = {
        line.split(" | ")[0].strip("| "): line
        for line in defaults_section(folder)
        if line.startswith("| ")
    }
    assert {"tabular", "forex", "massspec", "segmentation", "images"} <= shown.keys()
    published = json.loads((folder / "defaults-nvidia-h200.json").read_text("utf-8"))["result"]
    for recipe, row in published.items():
        assert "n/a" not in shown[recipe]
        assert f"{row['baseline']} {row['baseline_value']:.3g}" in shown[recipe]
