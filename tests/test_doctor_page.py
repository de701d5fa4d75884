"""The doctor's page: complete, escaped, and readable in a real browser."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from browser import browse, check_widths
from stoker.doctor.findings import Consultation, Finding, Gain, Outcome, Patch
from stoker.doctor.findings_page import draw_timeline, findings_page, gain_text, spread_text
from stoker.doctor.measurements import (
    Ablation,
    Alternative,
    BadValues,
    HostCall,
    LoaderFacts,
    LoaderWork,
    MachineFacts,
    Measurements,
    MemoryFacts,
    TimelineSpan,
)
from stoker.measure.readings import Spread
from test_quality_page import HOSTILE, Strict


def spread(value, count=20):
    return Spread(value, value * 0.9, value * 1.1, count)


def spans(lane="main", steps=4):
    for number in range(steps):
        at = number * 0.01
        yield TimelineSpan(number, lane, "wait", at, 0.002)
        yield TimelineSpan(number, lane, "step", at + 0.002, 0.008)
        yield TimelineSpan(number, lane, "forward", at + 0.002, 0.003)
        yield TimelineSpan(number, lane, "backward", at + 0.005, 0.004)
        yield TimelineSpan(number, "worker 0", "load", at, 0.009)


def test_every_class_in_the_markup_has_a_style():
    package = Path(stoker.__file__).parent
    styled = set(re.findall(r"\.([a-z][\w-]*)", (package / "page/_style.py").read_text()))
    named = {}
    for path in package.rglob("*.py"):
        text = path.read_text()
        if "stoker.page" in text or "stoker import page" in text or path.parent.name == "page":
            for each in re.findall(r'<[^>]*?class=(?:"([^"{}]*)|(\w+))', text):
                named |= dict.fromkeys("".join(each).split(), path.name)
    assert {name: file for name, file in named.items() if name not in styled} == {}


def a_finding(name="starved-by-loader", word="seen", **more):
    facts = {
        "title": f"title {word}",
        "evidence": (f"12 ms at train.py:7, {word}", "second line"),
        "remedy": f"Do {word}.",
        "gain": Gain(1.2, 1.5, 1.9),
        "samples_per_second": 1000.0,
        "patch": Patch({"training.batch_size": 64}, {"num_workers": 4}, "train.py:7", word),
    }
    return Finding(name, **(facts | more))


def a_consultation(word="seen", kind="job", findings=None):
    measured = Measurements(
        subject=word or "c.yaml",
        kind=kind,
        machine=MachineFacts(cores=2, device_name=word, torch="2"),
        steps=20,
        seconds=0.2,
        samples_per_step=16.0,
        step_seconds=spread(0.01),
        wait_seconds=spread(0.002),
        backward_seconds=spread(0.004),
        loader=LoaderFacts(
            kind="stoker", tier="chunked", batch_size=16, where=word, batch_bytes=4096,
            work=LoaderWork(read=0.001, decode=0.002, transform=0.0, collate=0.0005),
        ),
        syncs=(HostCall(f"{word}:3", "item", 1.0, 0.001),),
        memory=MemoryFacts(host_bytes=10**9),
        bad_values=(BadValues(word, word, 1, 2),),
        ablation=Ablation(
            spread(0.003), spread(0.008), None, spread(0.01), None, ((32, 0.009), (64, 0.012)),
            spread(1600.0),
            (
                Alternative("batch-too-small", {"training.batch_size": 64}, word, spread(3200.0)),
                Alternative("launch-bound", {"training.capture": "auto"}, "why", None, "no room"),
            ),
        ),
        timeline=tuple(spans(word or "main")),
        notes=(f"note {word}",),
    )  # fmt: skip
    if findings is None:
        findings = (a_finding(word=word), a_finding("memory-creep", word, ends_the_run=True))
    outcome = Outcome(a_finding(word=word), f"change {word}", 1000.0, 1450.0)
    return Consultation(measured, tuple(findings), outcome)


class TestPage:
    def test_everything_is_there(self):
        text = findings_page(a_consultation())
        parsed = Strict(text)
        wanted = {
            "summary", "outcome", "findings", "findings-table", "step", "waterfall", "timeline",
            "lanes", "alone", "alone-table", "batch-table", "tried-table", "loader", "loader-table",
            "notes",
        }  # fmt: skip
        assert wanted <= set(parsed.ids)
        assert len(parsed.ids) == len(set(parsed.ids))
        for words in (
            "1,600", "× 1.50 (1.20 to 1.90)", "train.py:7", "stoker doctor explain starved-by-loader",
            "waiting for data", "fetching values from the step", "backward pass", "no room",
            "1,000", "1,450", "× 1.45", "12 ms", "decoding", "chunked", "note seen",
        ):  # fmt: skip
            assert words in text
        assert text.index("starved-by-loader") < text.index("memory-creep")

    def test_a_job_is_told_keys_and_a_script_lines(self):
        job = findings_page(a_consultation(kind="job"))
        script = findings_page(a_consultation("seen", kind="script"))
        assert "training.batch_size: 64</code>" in job
        assert "<code>train.py:7:</code><br><code>seen</code>" in script
        assert "<code>train.py:7:</code>" not in job

    def test_it_needs_nothing_from_outside(self):
        text = findings_page(a_consultation())
        parsed = Strict(text)
        assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
        assert not re.search(r"https?:|url\(|@import", text)

    def test_a_healthy_job_and_one_that_was_not_seen(self):
        healthy = replace(a_consultation(findings=()), outcome=None)
        text = findings_page(healthy)
        assert "Nothing to fix." in text
        assert "nothing to fix." in text
        assert "outcome" not in Strict(text).ids
        unseen = Consultation(Measurements("python train.py"), ())
        text = findings_page(unseen)
        Strict(text)
        assert "no training step was seen" in text

    @pytest.mark.parametrize("hostile", HOSTILE)
    def test_hostile_words_are_shown_not_run(self, hostile):
        for kind in ("job", "script"):
            text = findings_page(a_consultation(hostile, kind))
            parsed = Strict(text)
            assert not {"script", "img"} & set(parsed.tags)
            assert not [name for name in parsed.attributes if name.startswith("on")]
            assert len(text) < 100_000
            text.encode("utf-8")

    @given(st.text(alphabet=st.characters(exclude_categories=()), min_size=1, max_size=40))
    def test_any_word_gives_a_sound_page(self, word):
        # One lane and one line whatever the word is: newlines in a patch make lines of their own.
        word = " ".join(word.split()) or "n"
        tags = Strict(findings_page(a_consultation(word))).tags
        assert tags == Strict(findings_page(a_consultation("n"))).tags

    def test_words_for_gains_and_spreads(self):
        assert gain_text(a_finding(gain=Gain())) == "n/a"
        assert gain_text(a_finding(gain=Gain(), ends_the_run=True)) == "saves the run"
        assert spread_text(None) == "n/a"
        assert spread_text(spread(0.01)) == "10 ms (9 ms to 11 ms)"
        assert spread_text(spread(0.01, count=1)) == "10 ms"


class TestTimeline:
    def test_spans_stay_inside_the_picture(self):
        text = draw_timeline(list(spans()))
        for left, wide in re.findall(r"M([\d.]+) 4h([\d.]+)v16", text):
            assert float(left) + float(wide) <= 100.001
        assert text.count("var(--c1)") == 1 + 4  # the legend, and a wait of each step
        assert "4 steps in 40 ms." in text
        assert 'aria-label="main: wait 8 ms, step 32 ms, forward 12 ms, backward 16 ms"' in text

    def test_none_and_very_many(self):
        assert "No step was drawn" in draw_timeline([])
        assert "No step was drawn" in draw_timeline([TimelineSpan(0, "main", "wait", 0.0, 0.0)])
        many = [TimelineSpan(n, "main", "unheard-of", n * 1e-3, 1e-3) for n in range(50_000)]
        assert len(draw_timeline(many)) < 100_000


class TestBrowser:
    """In a real browser, at the widths of a desk and of a phone."""

    @pytest.fixture
    def written(self, tmp_path):
        path = tmp_path / "page.html"
        word = "python train.py --a-very-long-option=" + "deeper/" * 30
        findings = [a_finding(word=word), *(a_finding(f"name-{n}", "w") for n in range(6))]
        path.write_text(findings_page(a_consultation(word, "script", findings)), encoding="utf-8")
        return path

    def test_it_renders_without_a_word_on_the_console(self, written):
        dom, said = browse(written)
        assert 'id="findings-table"' in dom
        assert 'id="lanes"' in dom
        assert "CONSOLE" not in said  # `test_report_page.py` shows that it would be heard

    def test_no_horizontal_scroll(self, written):
        check_widths(written.parent, {"page.html": [390, 1200]})
