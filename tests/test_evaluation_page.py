"""The evaluation on the page of a run: verdict, confusion, examples, data, and what changed since the last run."""

from __future__ import annotations

import base64
import re
from dataclasses import replace

import pytest

from browser import check_widths
from stoker.report import LOG_NAME, RunLog
from stoker.runs.evaluation import Confusion, Curve, Evaluation, Example
from stoker.runs.evaluation_page import evaluation_section
from stoker.runs.reading import find_previous, read_run
from stoker.runs.run_page import run_page

PIXEL = "data:image/png;base64," + base64.b64encode(b"png").decode()
MADE = Evaluation(
    30, ("macro_f1", True), {"macro_f1": 0.5, "accuracy": 0.6}, {"macro_f1": (0.4, 0.6)},
    {"majority": {"macro_f1": 0.2}, "boosted trees": {"macro_f1": 0.7}},
    {"class": {"<b>cat</b>": {"recall": 0.5, "samples": 20.0},
               "dog": {"precision": 0.25, "recall": 1.0, "samples": 10.0}}},
    Confusion(("<b>cat</b>", "dog"), ((10, 10), (0, 10))),
    (Curve("Calibration", "probability", "share", {"model": [(0.1, 0.2), (0.9, 0.8)]}),),
    {"<i>age</i>": 0.25, "size": -0.01},
    (
        Example("text", "7", "cat", "dog (90%)"),
        Example("image", "a.png", "cat", "dog", {"image": PIXEL, "evil": "https://example.org/x.png"}),
        Example("spectrum", "water", lines={"truth": [(18.0, 999.0), (17.0, 200.0)], "answer": [(18.0, 1.0)]}),
        Example("series", "2020-01-01", "+3 pips", "up",
                lines={"what came": [(0, 0), (1, 3)], "forecast": [(0, 0), (1, 1)]}),
    ),
    ("a <note>",),
)  # fmt: skip


def test_the_section_has_the_verdict_and_all_parts():
    made = evaluation_section(MADE, "worth")
    assert "not worth training" in made
    assert 'class="badge refuse"' in made
    assert "&lt;b&gt;cat&lt;/b&gt;" in made
    assert "<b>cat" not in made
    assert "<i>age" not in made
    assert made.index("precision") < made.index("recall</th>")  # of the longest row
    assert "--share:50%" in made
    assert PIXEL in made
    assert "example.org" not in made  # only pictures as bytes
    assert "2 true peaks above, 1 predicted below" in made
    assert "<span>m/z 0</span><span>9</span><span>18</span>" in made  # the axis can be read
    assert "+3 pips" in made
    assert "a &lt;note&gt;" in made


def test_pictures_have_captions_and_colours_names():
    masks = Example("image", "a.png", pictures={"picture": PIXEL, "<truth>": PIXEL})
    colours = {"<sky>": "#aabbcc", "evil": "#fff;background:url(//example.org)"}
    made = evaluation_section(replace(MADE, examples=(masks,), colours=colours), "worth")
    assert ">&lt;truth&gt;</span>" in made
    assert '<i style="background:#aabbcc"></i>&lt;sky&gt;' in made
    assert "example.org" not in made


def test_runs_side_by_side_have_their_test_metrics_beside_each_other(tmp_path):
    better = replace(MADE, metrics={"macro_f1": 0.9, "accuracy": 0.95})
    write_run(tmp_path / "one", 1000.0, 1e-4, "x", MADE)
    write_run(tmp_path / "two", 2000.0, 5e-4, "y", better)
    write_run(tmp_path / "none", 3000.0, 5e-4, "y", None)
    one, two, none = (read_run(tmp_path / name) for name in ("one", "two", "none"))
    text = re.sub("<[^>]+>", " ", run_page([one, two], None))
    assert re.search(r"Test macro f1\s+0.5\s+0.9\s+Test accuracy\s+0.6\s+0.95", text)
    assert "Test macro f1" not in run_page([one, none], None)


@pytest.mark.parametrize(
    ("reached", "kind"), [(0.9, "good"), (0.72, "warn"), (0.5, "refuse"), (float("nan"), "note")]
)
def test_the_badge_is_that_of_the_verdict(reached, kind):
    span = {"macro_f1": (reached - 0.1, reached + 0.1)}
    made = replace(MADE, metrics={"macro_f1": reached}, intervals=span)
    assert f'class="badge {kind}"' in evaluation_section(made, "worth")


def write_run(folder, moment: float, lr: float, digest: str, evaluation: Evaluation | None):
    folder.mkdir(parents=True)
    times = iter(range(10**6))
    with RunLog(folder / LOG_NAME, clock=lambda: moment + next(times)) as log:
        settings = {"recipe.name": "tabular", "training.lr": lr}
        log.write("config", {"settings": settings, "reasons": {}})
        log.write("data", {
            "store": "/data/s", "digest": digest, "code": "stoker 0.1.0, a", "num_samples": 50,
            "splits": {"train": 30, "val": 5, "test": 5, "unused": 10}, "repairs": {"features": ["fill:median"]},
            "counts": {"found": 53, "packed": 50, "refused": {"3 cells instead of 4": 2}, "ignored": {"hidden": 1}},
        })  # fmt: skip
        log.write("result", {"evaluation": None if evaluation is None else evaluation.to_json()})
        log.write("end", {"ended": "done", "error": ""})


def test_the_page_says_what_was_left_out_and_what_changed(tmp_path):
    better = replace(MADE, metrics={"macro_f1": 0.9, "accuracy": 0.95})
    write_run(tmp_path / "older", 900.0, 1e-5, "x", None)
    write_run(tmp_path / "before", 1000.0, 1e-4, "x", MADE)
    write_run(tmp_path / "now", 2000.0, 5e-4, "y", better)
    write_run(tmp_path / "later", 3000.0, 5e-4, "y", better)
    (tmp_path / "noise").mkdir()
    (tmp_path / "noise" / LOG_NAME).write_bytes(b"\x00\n")
    run = read_run(tmp_path / "now")
    before = find_previous(run)
    assert before is not None
    assert before.name == "before"
    page = run_page([run], before)
    data = page[page.index('id="data"') :]
    assert "3 cells instead of 4" in data
    assert "fill:median" in data
    since = page[page.index('id="since"') : page.index('id="speed"')]
    assert "0.0005" in since
    assert "changed" in since
    assert "the same" in since  # the code
    assert "0.95" in since
    assert run.num_sessions == 1
    for title in ("Evaluation", "Since the last run", "Data"):
        assert f"<h2>{title}</h2>" in page


def test_a_first_run_and_one_of_another_recipe_have_no_last_run(tmp_path):
    write_run(tmp_path / "a", 1000.0, 1e-4, "x", MADE)
    assert find_previous(read_run(tmp_path / "a")) is None
    page = run_page([read_run(tmp_path / "a")], None)
    assert 'id="since"' not in page
    assert 'id="worth"' in page


def test_a_bar_stands_below_shares_only():
    rows = {"1 bar": {"samples": 1.0, "gross_pips": 0.4, "hit_rate": 0.5}}
    made = replace(MADE, confusion=None, importance={}, groups={"horizon": rows})
    text = evaluation_section(made, "worth")
    assert 'class="meter" style="--share:50%"' in text
    assert "--share:40%" not in text


def test_metrics_and_baselines_fit_a_phone_and_groups_a_desk(tmp_path):
    names = [
        "weighted_cosine", "cosine", "stein_scott_cosine", "entropy_similarity", "recall@1", "recall@5",
        "recall@10", "recall@1_within_5da", "recall@5_within_5da", "recall@10_within_5da",
    ]  # fmt: skip
    values = dict.fromkeys(names, 0.4502)
    made = replace(
        MADE,
        compared_by=(names[0], True),
        metrics=values,
        intervals=dict.fromkeys(names, (0.4239, 0.4774)),
        baselines={"mean training spectrum": values, "nearest neighbour by fingerprint": values},
        groups={"elements": {"with other elements": values | {"samples": 1215.0}}},
    )
    write_run(tmp_path / "run", 1000.0, 1e-4, "x", made)
    (tmp_path / "page.html").write_text(run_page([read_run(tmp_path / "run")]), encoding="utf-8")
    phone = 390 + 15  # a frame's scroll bar takes width, a phone's does not
    check_widths(tmp_path, {"page.html": [phone]}, ("worth-0-overall",))
    check_widths(tmp_path, {"page.html": [1200]}, ("worth-0-overall", "worth-0-group-0"))


def test_an_axis_of_shares_is_named_between_its_ends():
    calibration = Curve("Calibration", "probability", "share", {"model": [(0.0, 0.0), (1.0, 1.0)]})
    made = evaluation_section(replace(MADE, curves=(calibration,)), "worth")
    names = re.findall("<span[^>]*>([^<]*)</span>", made.split('class="xs"')[1].split("</div>")[0])
    assert names == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]


def test_the_strongest_baseline_stands_beside_the_model():
    made = evaluation_section(MADE, "worth")
    heads = re.findall(
        "<th[^>]*>([^<]*)</th>", made.split('id="worth-overall"')[1].split("</thead>")[0]
    )
    assert heads == ["metric", "model", "95 % interval", "boosted trees", "majority"]
