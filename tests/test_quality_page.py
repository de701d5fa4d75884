"""The inspect page: complete, escaped, and readable in a real browser."""

from __future__ import annotations

import re
import shlex
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from browser import browse, check_widths
from stoker import page
from stoker.store import quality_page as quality_page_module
from stoker.store.quality import judge
from stoker.store.quality_page import histogram, quality_page
from stoker.store.table_stats import TableStats

VOID = {"meta", "br"}
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onload='alert(1)",
    "&lt;b&gt; &amp;",
    "Größe µ 値段 🜁 \u202egnitset",
    "nul\x00 bell\x07 lone \ud800 surrogate",
    "x" * 10_000,
    "",
]


class Strict(HTMLParser):
    """Reads a page and notes its elements; fails where tags do not match."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.ids, self.attributes = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def table_with(columns, num_rows=300):
    values = np.random.default_rng(0).normal(size=(num_rows, len(columns))).astype(np.float32)
    values[7, 0] = 1e15
    values[8, -1] = np.nan
    return TableStats.scan(values, columns)


def render(stats, title="store", facts=None):
    findings = [finding for each in stats.values() for finding in judge(each)]
    return quality_page(title, stats, findings, facts or {})


class TestPage:
    def test_everything_is_there(self):
        stats = {"features": table_with(["alpha", "beta", "gamma"])}
        text = render(stats, "my store", {"Rows": "300"})
        parsed = Strict(text)
        assert {"summary", "findings", "findings-table", "shapes-0", "columns-0"} <= set(parsed.ids)
        assert {"shape-0-0", "shape-0-1", "shape-0-2"} <= set(parsed.ids)
        assert len(parsed.ids) == len(set(parsed.ids))
        assert "2 findings would stop a pack." in text
        assert "more than a million times the usual" in text
        assert text.index(">refuse<") < text.index(">warn<")
        for word in ("my store", "alpha", "beta", "gamma", "300"):
            assert word in text

    def test_it_needs_nothing_from_outside(self):
        text = render({"features": table_with(["a", "b"])})
        parsed = Strict(text)
        assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
        assert not re.search(r"https?:|url\(|@import", text)
        assert "default-src 'none'" in text

    def test_clean_and_empty_data(self):
        values = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
        assert "Nothing wrong was found." in render({"x": TableStats.scan(values)})
        for empty in (values[:0], values[:, :0], values * np.float32(np.nan)):
            Strict(render({"x": TableStats.scan(empty)}))
        Strict(render({}))

    @pytest.mark.parametrize("hostile", HOSTILE)
    def test_hostile_names_are_shown_not_run(self, hostile):
        stats = {hostile: table_with([hostile, "plain"])}
        text = render(stats, hostile, {hostile or "key": hostile})
        parsed = Strict(text)
        assert not {"script", "img"} & set(parsed.tags)
        assert not [name for name in parsed.attributes if name.startswith("on")]
        assert len(text) < 40_000
        text.encode("utf-8")

    @given(st.text(alphabet=st.characters(exclude_categories=()), max_size=40))
    def test_any_name_gives_a_sound_page(self, name):
        text = render({name: table_with([name, name + "2"])}, name, {name: name})
        reference = render({"n": table_with(["n", "n2"])}, "n", {"n": "n"})
        # Which words are set as code may differ; nothing else may.
        tags, expected = (
            [tag for tag in Strict(each).tags if tag != "code"] for each in (text, reference)
        )
        assert tags == expected
        text.encode("utf-8")

    def test_wide_tables_are_cut_with_a_note(self, monkeypatch):
        monkeypatch.setattr(quality_page_module, "MAX_COLUMNS_DRAWN", 5)
        text = render({"f": table_with([f"c{index}" for index in range(12)])})
        parsed = Strict(text)
        assert sum(id_.startswith("shape-0-") and id_.count("-") == 2 for id_ in parsed.ids) == 5
        assert "shape-0-11" in parsed.ids
        assert "7 columns more, not drawn" in text

    def test_400_columns_stay_small(self):
        text = render({"f": table_with([f"c{index}" for index in range(500)])})
        assert "100 columns more, not drawn" in text
        assert len(text) < 1_000_000

    def test_extreme_bars_are_red(self):
        text = render({"f": table_with(["a", "b"])})
        assert len(re.findall('class="bar marked"', text)) == 1


class TestPictures:
    @given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=40))
    def test_histogram_holds_every_value_between_its_edges(self, numbers):
        stats = TableStats.scan(np.array(numbers, dtype=np.float64).reshape(-1, 1))
        counts, edges = histogram(stats, 0)
        assert len(edges) == len(counts) + 1
        assert (np.diff(edges) >= 0).all()
        values = stats.sampled(0)
        inside = (values >= edges[0]) & (values <= edges[-1])
        assert counts.sum() == inside.sum()

    def test_whole_numbers_get_a_bar_each(self):
        values = np.repeat([0, 1, 5], [10, 20, 30]).reshape(-1, 1)
        counts, edges = histogram(TableStats.scan(values), 0)
        assert counts.tolist() == [10, 20, 0, 0, 0, 30]
        assert edges.tolist() == [0, 1, 2, 3, 4, 5, 6]

    def test_svg_tells_what_it_shows(self):
        text = page.svg_histogram([0, 3, 1], [0.0, 1.0, 2.0, 3.0], "<ages>", key="k")
        assert 'role="img"' in text
        assert '<title id="k-t">&lt;ages&gt;</title>' in text
        assert "4 values from 0 to 3 in 3 bars; the highest has 3." in text

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (None, "n/a"), (float("nan"), "n/a"), (float("inf"), "n/a"), (0.0, "0"),
            (1234.4, "1,234"), (0.03125, "0.03125"), (4.96e8, "4.96×10⁸"), (-2e-7, "-2×10⁻⁷"),
            (1e15, "1×10¹⁵"), (7.0, "7"),
        ],
    )  # fmt: skip
    def test_numbers(self, value, text):
        assert page.format_number(value) == text

    def test_instructions_set_commands_as_code(self):
        text = page.instruction("--repair 'clip@a b', or drop it: --drop x. Done")
        assert text == (
            "<code>--repair &#x27;clip@a b&#x27;</code>, or drop it: <code>--drop x</code>. Done"
        )
        quoted = shlex.quote('it\'s @ "odd"')
        assert page.instruction(f"--drop {quoted}; or") == f"{page.code(f'--drop {quoted}')}; or"


class TestBrowser:
    @pytest.fixture
    def written(self, tmp_path):
        columns = ["Flow Bytes/s", *HOSTILE[:6], "x" * 10_000, *(f"c{i}" for i in range(20))]
        stats = {"features": table_with(columns), "y" * 200: table_with(["label" * 50])}
        facts = {"Store": "/a/very/long/path/" + "deeper/" * 30, "Rows": "300"}
        path = tmp_path / "page.html"
        path.write_text(render(stats, "s" * 300, facts), encoding="utf-8")
        return path

    def test_it_renders(self, written):
        dom, _ = browse(written)
        assert 'id="findings-table"' in dom
        assert 'id="shape-0-27"' in dom
        assert "<script" not in dom

    def test_no_horizontal_scroll(self, written):
        wide = written.with_name("wide.html")
        wide.write_text("<!doctype html><p style='width: 900px'>wide")
        # In this order: the first page passes, and a page that is too wide would be noticed.
        with pytest.raises(AssertionError, match=r"wide\.html"):
            check_widths(wide.parent, {"page.html": [320, 390], "wide.html": [390]})
