"""Evaluations: counts, intervals, calibration, verdicts, and the way through a log."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.recipes.classification import (
    average_precision,
    class_examples,
    confusion_counts,
    evaluate_classes,
    reliability,
)
from stoker.recipes.metrics import bootstrap, bootstrap_counts
from stoker.runs.evaluation import Confusion, Curve, Evaluation, Example
from stoker.strict_json import json_text, parse_json

NAMES = ("calm", "alarm", "rare")


def some_probabilities(count: int = 400, seed: int = 0):
    rng = np.random.default_rng(seed)
    labels = rng.choice(3, count, p=(0.7, 0.28, 0.02))
    scores = rng.normal(size=(count, 3)) + 2.0 * np.eye(3)[labels]
    shares = np.exp(scores)
    return shares / shares.sum(axis=1, keepdims=True), labels


def test_metrics_of_classes_are_those_of_their_definitions():
    probabilities, labels = some_probabilities()
    answers = probabilities.argmax(axis=1)
    report = evaluate_classes(probabilities, labels, NAMES, quiet_class=0)
    scores = []
    for place, name in enumerate(NAMES):
        row = report.groups["class"][name]
        hits = sum(1 for a, b in zip(answers, labels, strict=True) if a == b == place)
        precision, recall = hits / np.sum(answers == place), hits / np.sum(labels == place)
        assert row["precision"] == pytest.approx(precision)
        assert row["recall"] == pytest.approx(recall)
        scores.append(2 * precision * recall / (precision + recall))
        # The area by its definition: the mean precision at the rank of every true sample.
        order = sorted(range(len(labels)), key=lambda n: -probabilities[n, place])
        found, precisions = 0, []
        for rank, sample in enumerate(order, 1):
            if labels[sample] == place:
                found += 1
                precisions.append(found / rank)
        assert row["pr_auc"] == pytest.approx(np.mean(precisions))
    assert report.metrics["macro_f1"] == pytest.approx(np.mean(scores))


def test_rows_of_the_confusion_matrix_are_true_classes():
    report = evaluate_classes(np.eye(3)[[0, 1, 1, 2]], np.array([0, 0, 1, 2]), NAMES, quiet_class=0)
    assert report.confusion is not None
    assert report.confusion.counts == ((1, 1, 0), (0, 1, 0), (0, 0, 1))
    assert report.metrics["accuracy"] == 0.75
    assert report.metrics["false_alarms_per_1000"] == 500.0
    assert report.groups["class"]["alarm"] == {
        "precision": 0.5, "recall": 1.0, "f1": pytest.approx(2 / 3), "pr_auc": 0.5, "samples": 1.0,
    }  # fmt: skip


def test_a_class_without_samples_has_no_recall_and_does_not_count():
    report = evaluate_classes(np.eye(3)[[0, 1]], np.array([0, 1]), NAMES)
    assert math.isnan(report.groups["class"]["rare"]["recall"])
    assert report.metrics["macro_f1"] == report.metrics["balanced_accuracy"] == 1.0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=30))
def test_average_precision_does_not_depend_on_the_order(rows):
    scores = np.array([score for score, _ in rows], float)
    is_true = np.array([truth for _, truth in rows])
    found = average_precision(scores, is_true)
    again = average_precision(scores[::-1], is_true[::-1])
    if not is_true.any():
        assert math.isnan(found)
        return
    assert found == pytest.approx(again)
    assert is_true.mean() - 1e-12 <= found * len(rows)
    assert found <= 1 + 1e-12


def test_calibration_is_perfect_where_confidence_is_the_share_of_hits():
    probabilities = np.tile([0.75, 0.25], (400, 1))
    labels = np.repeat([0, 0, 0, 1], 100)
    _, error = reliability(probabilities, labels)
    assert error == pytest.approx(0.0)
    _, error = reliability(np.tile([0.99, 0.01], (400, 1)), labels)
    assert error == pytest.approx(0.24)


# -- intervals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [200, 20_000])
def test_the_interval_of_a_mean_is_that_of_theory(count):
    hits = np.random.default_rng(1).random(count) < 0.3
    low, high = bootstrap(hits)
    half = 1.96 * math.sqrt(hits.mean() * (1 - hits.mean()) / count)
    assert (high - low) / 2 == pytest.approx(half, rel=0.12)
    assert low < hits.mean() < high


def test_neighbours_that_depend_on_each_other_widen_the_interval():
    hits = np.repeat(np.random.default_rng(2).random(100) < 0.5, 20)
    alone, together = bootstrap(hits), bootstrap(hits, block=20)
    assert together[1] - together[0] > 3 * (alone[1] - alone[0])


def test_intervals_of_counts_agree_with_those_of_samples():
    probabilities, labels = some_probabilities(2000)
    answers = probabilities.argmax(axis=1)
    matrix = confusion_counts(labels, answers, 3)
    of_counts = bootstrap_counts(
        matrix, lambda c: np.trace(c, axis1=1, axis2=2) / c.sum(axis=(1, 2))
    )
    of_samples = bootstrap(answers == labels)
    assert of_counts == pytest.approx(of_samples, abs=0.01)


def test_too_few_samples_have_no_interval():
    assert all(math.isnan(end) for end in bootstrap(np.array([1.0])))
    assert all(math.isnan(end) for end in bootstrap_counts(np.array([[1]]), lambda c: c[:, 0, 0]))


# -- verdicts --------------------------------------------------------------------------------------


def evaluation(reached: float, span: tuple[float, float], baseline: float, more: bool = True):
    return Evaluation(
        100, ("f1", more), {"f1": reached}, {"f1": span},
        {"majority": {"f1": 0.1 if more else 9.0}, "boosting": {"f1": baseline}},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("made", "worth"),
    [
        (evaluation(0.9, (0.85, 0.95), 0.8), "better"),
        (evaluation(0.9, (0.75, 0.95), 0.8), "unclear"),
        (evaluation(0.7, (0.6, 0.95), 0.8), "worse"),
        (evaluation(0.8, (0.6, 0.95), 0.8), "worse"),
        (evaluation(0.2, (0.1, 0.3), 0.4, more=False), "better"),
        (evaluation(0.5, (0.1, 0.9), 0.4, more=False), "worse"),
        (evaluation(math.nan, (0.1, 0.9), 0.4), "unknown"),
        (Evaluation(3, ("f1", True), {"f1": 1.0}), "unknown"),
        (replace(evaluation(0.7, (0.0, 1.0), 0.8), num_samples=9), "few"),
    ],
)
def test_a_model_is_worth_training_where_it_beats_every_baseline(made, worth):
    assert made.worth == worth
    assert ("not worth training" in made.verdict) == (worth == "worse")
    if worth != "unknown":
        assert "boosting" in made.verdict or worth == "better"


def test_an_evaluation_comes_back_from_a_log():
    probabilities, labels = some_probabilities(60)
    report = evaluate_classes(probabilities, labels, NAMES)
    made = Evaluation(
        60, ("macro_f1", True), report.metrics, report.intervals, {"majority": {"macro_f1": 0.2}},
        report.groups, Confusion(NAMES, ((1, 0, 0), (0, 2, 0), (0, 0, 3))),
        (Curve("Calibration", "p", "share", {"model": [(0.0, 0.5)]}),), {"age": 0.25},
        (*class_examples(range(60), probabilities, labels, NAMES),
         Example("spectrum", "water", lines={"truth": [(18.0, 999.0)]}, pictures={"a": "data:"})),
        ("a note",), {"cat": "#aabbcc"},
    )  # fmt: skip
    again = Evaluation.from_json(parse_json(json_text(made.to_json())))
    assert again is not None
    assert again.to_json() == made.to_json()
    assert again.verdict == made.verdict


@pytest.mark.parametrize(
    "values",
    [
        None, [], {"num_samples": "x"}, {"num_samples": 1},
        {"num_samples": 1, "compared_by": "x", "confusion": {"names": ["a"], "counts": [3]},
         "curves": [{"lines": {"a": [1, [2]]}}], "examples": [{"kind": "film"}, 3],
         "intervals": {"x": [1]}, "groups": {"class": 3}, "metrics": {"x": "nan"}, "notes": 1},
    ],
)  # fmt: skip
def test_a_log_of_any_content_is_read(values):
    made = Evaluation.from_json(values)
    assert made is None or made.worth == "unknown"
