"""Exports that take long to trace: images of any size, graphs of molecules, several timeframes."""

from __future__ import annotations

import numpy as np
import pytest

from stoker.recipes.contract import Sizes
from stoker.recipes.export.graph import deploy
from stoker.recipes.export.trained import export_trained
from test_export import CLOSE, compare_predictions, exported, made, open_session

__all__ = ["exported", "made"]  # fixtures

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def test_an_image_may_have_any_size(made, tmp_path):
    trained = made("segmentation")[1]
    report = export_trained(trained, tmp_path / "any.onnx")
    assert report.inputs["images"]["shape"] == ["batch", 3, "height", "width"]
    graph, session = deploy(trained, Sizes()), open_session(report.path)
    for batch, height, width in ((1, 1, 1), (3, 31, 2), (17, 8, 40), (2, 64, 96), (1, 130, 33)):
        (images,) = graph.draw({"batch": batch, "height": height, "width": width})
        mask, scores = session.run(None, {"images": images.numpy()})
        wanted = graph(images)
        np.testing.assert_allclose(scores, wanted[1].numpy(), **CLOSE)
        assert (mask == wanted[0].numpy()).mean() > 0.99  # a tie may fall either way


@pytest.mark.parametrize("kind", ["massspec-teacher", "forex-all"])
def test_onnxruntime_says_what_stoker_predict_says(kind, made, exported):
    compare_predictions(kind, made, exported)
