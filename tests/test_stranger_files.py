"""Files as people have them, and what stoker answered wrongly or not at all when strangers brought theirs."""

import math
import re
import shlex
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from stoker.errors import InputError, QualityError, SourceError
from stoker.packing import PackOptions, pack
from stoker.recipes.images.recipe import PictureReader
from stoker.recipes.inference import load_trained
from stoker.runs.evaluation import Evaluation
from stoker.sources.bars.reading import read_bars
from stoker.sources.bars.timeframes import name_file
from stoker.sources.images.decoding import decode, to_pixels
from stoker.sources.images.listing import list_pictures
from stoker.sources.images.masks import check_values, parse_mask_map
from stoker.sources.images.segmentation import SegmentationSource
from stoker.store.reader import open_store

_SMALL = {
    "facts": {"size": (4, 4), "channels": 3, "value_range": None, "first_frame": False},
    "batch_size": 8,
}  # fmt: skip

# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("AUDJPYh1.csv", ("AUDJPY", "H1")),
        ("AUDJPYd1.csv", ("AUDJPY", "D1")),
        ("XAUUSDM15.csv.gz", ("XAUUSD", "M15")),
        ("EURUSD60.csv", ("EURUSD", "H1")),
        ("EURUSDm7.csv", ("EURUSDM7", None)),
        ("US30.csv", ("US30", None)),
        ("BTC_USDT_1h.csv", ("BTC_USDT", "H1")),
        ("Binance_ETHUSDT_1h.csv", ("BINANCE_ETHUSDT", "H1")),
        ("EUR_USD_M5_2020.csv", ("EUR_USD", "M5")),
        ("eurusd-m1-bid-2020-01-01.csv", ("EURUSD", "M1")),
        ("EURUSD_Candlestick_1_M_BID_01.01.2020-02.01.2020.csv", ("EURUSD", "M1")),
        ("EURUSD_Candlestick_4_Hour_ASK_01.01.2020-02.01.2020.csv", ("EURUSD", "H4")),
        ("EURUSD_Candlestick_1_D_BID_01.01.2020-02.01.2020.csv", ("EURUSD", "D1")),
        ("EURUSD_Candlestick_1_Month_BID_01.01.2020-02.01.2020.csv", ("EURUSD", None)),
        ("eurusd_d.csv", ("EURUSD", "D1")),
        ("Binance_BTCUSDT_d.csv", ("BINANCE_BTCUSDT", "D1")),
        ("daily.csv", ("DAILY", None)),
    ],
)
def test_a_timeframe_behind_the_symbol_is_not_minutes(name, wanted):
    assert name_file(name) == wanted


def test_prices_with_a_dollar_are_prices(tmp_path):
    (tmp_path / "AAPL_D1.csv").write_text(
        "Date,Close/Last,Volume,Open,High,Low\n"
        "01/31/2020,$309.51,49897100,$320.93,$322.68,$308.29\n"
        '01/30/2020,"$1,323.87",31685810,"$1,320.54","$1,324.09","$1,318.75"\n'
        "01/29/2020,$324.34,54149930,$324.45,$327.85,$321.38\n"
    )
    bars = read_bars(tmp_path / "AAPL_D1.csv")
    assert bars.columns["close"].tolist() == [324.34, 1323.87, 309.51]
    assert bars.columns["open"].tolist() == [324.45, 1320.54, 320.93]
    assert not bars.refused


# -- pictures --------------------------------------------------------------------------------------


def test_pictures_that_cannot_be_read_have_a_reason_each(tmp_path):
    Image.new("RGB", (8, 6), "red").save(tmp_path / "a.jpg")
    (tmp_path / "a.jpg").rename(tmp_path / "saved.jfif")
    (tmp_path / "phone.HEIC").write_bytes(b"\0\0\0\x18ftypheic" + bytes(99))
    (tmp_path / "notes.txt").write_text("x")
    listing = list_pictures(tmp_path)
    assert listing.pictures == ["phone.HEIC", "saved.jfif"]
    reader = PictureReader.open(tmp_path, **_SMALL)
    (batch,) = reader
    assert batch.keys.tolist() == ["phone.HEIC", "saved.jfif"]
    assert batch.answered.tolist() == [False, True]
    assert batch.reasons == ["is HEIC, which Pillow does not read.", None]
    assert reader.notes() == [
        "1 file left out: not a picture (.txt)",
        "1 picture without an answer; see 'reason'",
    ]


def test_a_list_of_paths_is_answered_in_its_order(tmp_path):
    for name in ("b", "a"):
        Image.new("RGB", (8, 6), "red").save(tmp_path / f"{name}.png")
    given = [tmp_path / "b.png", str(tmp_path / "a.png"), tmp_path / "none.png"]
    (batch,) = PictureReader.open(given, **_SMALL)
    assert batch.keys.tolist() == list(map(str, given))
    assert batch.answered.tolist() == [True, True, False]
    assert "No such file" in batch.reasons[2]
    assert PictureReader.open([1, 2], **_SMALL) is None


def test_what_was_seen_of_some_pictures_is_not_said_of_all(tmp_path):
    from stoker.packing.samples import sample_facts, samples_of
    from stoker.sources.images.encoded import KeepEncoded
    from stoker.sources.images.source import ImagesSource

    (tmp_path / "in" / "a").mkdir(parents=True)
    for number in range(60):
        picture = Image.new("RGB", (8 + number % 7, 6), (number, 0, 0))
        picture.save(tmp_path / "in" / "a" / f"{number}.png")
    for name, keep in (("pixels", None), ("files", KeepEncoded())):
        source = ImagesSource(folder=tmp_path / "in", size=(4, 4), keep_encoded=keep)
        pack(source, tmp_path / name, PackOptions(jobs=1))
        with open_store(tmp_path / name) as store:
            facts = sample_facts(samples_of(store))
        some = re.search(r" \(in \d+ samples that were looked at\)$", facts["pixel values"])
        assert (some is None) == (keep is None)  # sixty small rows of pixels are all measured
        assert (facts["pictures"] == "4 x 4, 3 channels") == (keep is None)
        assert "looked" not in facts["classes"]


# -- masks -----------------------------------------------------------------------------------------


def write_coloured(folder, colours):
    """Write three pictures whose masks have the colours; the last mask has one more."""
    rng = np.random.default_rng(0)
    for part in ("images", "masks"):
        (folder / part).mkdir()
    for number in range(3):
        known = colours if number < 2 else [*colours, (1, 2, 3)]
        pixels = np.array(known, np.uint8)[rng.integers(0, len(known), (16, 16))]
        pixels.reshape(-1, 3)[: len(known)] = known
        Image.fromarray(pixels).save(folder / "masks" / f"{number}.png")
        Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(
            folder / "images" / f"{number}.png"
        )


def test_the_advice_for_colours_names_those_of_all_masks_and_works(tmp_path):
    """Colours that only other masks have were `other`: whole classes that counted nowhere."""
    write_coloured(tmp_path, [(10 * n, 255 - n, n) for n in range(11)])
    source = {"images": tmp_path / "images", "masks": tmp_path / "masks", "size": (8, 8)}
    with pytest.raises(QualityError, match="11 colours") as found:
        pack(SegmentationSource(**source), tmp_path / "store", PackOptions(jobs=1))
    option, entries = shlex.split(found.value.fix)
    assert option == "--mask-map"
    made = SegmentationSource(**source, mask_map=(entries,))
    pack(made, tmp_path / "store", PackOptions(jobs=1))
    with open_store(tmp_path / "store") as store:
        assert store.num_samples == 3
        assert store.manifest.attributes["mask_values"] == [*range(12)]
    assert parse_mask_map([entries]).other == 255
    some = SegmentationSource(**source, mask_map=("#00ff00=0,other=255",))
    made = pack(some, tmp_path / "store", PackOptions(jobs=1))
    with open_store(made.path) as store:
        (note,) = (note for note in store.manifest.attributes["notes"] if "255" in note)
    assert note.startswith("colours that --mask-map does not name")


def write_palettes(folder, palettes):
    """Write two pictures whose masks have the values 0 and 1, each in its own colours."""
    rng = np.random.default_rng(0)
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    for number, palette in enumerate(palettes):
        mask = Image.fromarray(rng.integers(0, 2, (8, 8), dtype=np.uint8), "P")
        mask.putpalette([channel for colour in palette for channel in colour])
        mask.save(folder / "masks" / f"{number}.png")
        Image.new("RGB", (8, 8), "red").save(folder / "images" / f"{number}.png")
    return SegmentationSource(images=folder / "images", masks=folder / "masks", size=(8, 8))


@pytest.mark.parametrize(
    ("values", "later", "stored"),
    [
        ([0, 1000, 2000], 3000, [0, 1, 2, 3]),
        ([0, 1, 700], 800, [0, 1, 2, 3]),
        ([0, *range(26_000, 26_030), 33_000], 24_001, [0, 1, 2, 3]),  # a class for each thousand
    ],
)
def test_a_map_of_values_above_255_has_all_of_them(tmp_path, values, later, stored):
    """Class numbers of 16 bits, and instances as class * 1000 + number: typing one value after the other never ends."""
    for part in ("images", "masks"):
        (tmp_path / part).mkdir()
    for number, held in enumerate((values, values, [*values, later])):
        pixels = np.resize(np.array(held, np.uint16), (8, 8))
        Image.fromarray(pixels).save(tmp_path / "masks" / f"{number}.png")
        Image.new("RGB", (8, 8)).save(tmp_path / "images" / f"{number}.png")
    source = SegmentationSource(images=tmp_path / "images", masks=tmp_path / "masks", size=(8, 8))
    with pytest.raises(QualityError) as told:
        pack(source, tmp_path / "store", PackOptions(jobs=1))
    option, entries = shlex.split(told.value.fix.partition(";")[0])[:2]
    assert option == "--mask-map"
    source = replace(source, mask_map=(entries,))
    with open_store(pack(source, tmp_path / "store", PackOptions(jobs=1)).path) as store:
        assert store.manifest.attributes["mask_values"] == stored


def test_a_value_has_one_colour_in_all_masks_with_a_palette(tmp_path):
    black, white, red = (0, 0, 0), (255, 255, 255), (255, 0, 0)
    same = write_palettes(tmp_path / "same", [(black, red), (black, red)])
    pack(same, tmp_path / "store", PackOptions(jobs=1))
    with open_store(tmp_path / "store") as store:
        assert store.manifest.attributes["mask_values"] == [0, 1]
    own = write_palettes(tmp_path / "own", [(black, white), (white, black)])
    with pytest.raises(
        SourceError, match="the value 0 is the colour #000000 in one and #ffffff"
    ) as e:
        pack(own, tmp_path / "other", PackOptions(jobs=1))
    option, entries = shlex.split(e.value.fix.partition(", or ")[0])
    assert option == "--mask-map"
    pack(replace(own, mask_map=(entries,)), tmp_path / "other", PackOptions(jobs=1))
    with open_store(tmp_path / "other") as store:
        masks = store.read_rows("masks", 0, 2)
    shown = [
        np.asarray(Image.open(tmp_path / "own" / "masks" / f"{n}.png").convert("L")) for n in "01"
    ]
    assert (masks == (np.stack(shown) == 255)).all()
    pack(replace(own, mask_map=("keep",)), tmp_path / "kept", PackOptions(jobs=1))


def test_masks_that_are_pictures_are_refused():
    check_values(dict.fromkeys(range(182), 5))
    with pytest.raises(SourceError, match="253 different values: these look like pictures"):
        check_values(dict.fromkeys(range(253), 5))


# -- runs ------------------------------------------------------------------------------------------


def test_one_test_sample_has_no_interval():
    made = Evaluation(
        1, ("miou", True), {"miou": 0.5}, {"miou": (math.nan, math.nan)}, {"prior": {"miou": 0.25}}
    )
    assert "miou 0.5 on 1 test sample, prior 0.25" in made.verdict
    assert "nan" not in made.verdict


def test_a_store_given_as_a_checkpoint_is_not_sent_to_a_file_that_is_not_there(tmp_path):
    (tmp_path / "store.json").write_text("{}")
    with pytest.raises(InputError) as found:
        load_trained(tmp_path)
    assert found.value.fix == f"ls {tmp_path}"
    (tmp_path / "best.pt").write_bytes(b"")
    with pytest.raises(InputError) as found:
        load_trained(tmp_path)
    assert found.value.fix == str(tmp_path / "best.pt")


def test_a_curve_of_one_value_is_drawn_as_a_dot():
    from stoker.page.charts import Chart, Line, line_chart

    points = [(0.0, None), (0.5, 0.4), (1.0, None)]
    chart = Chart(
        "key", "Calibration", [Line("model", points), Line("best", [(0.0, 0.0), (1.0, 1.0)])], ""
    )
    drawn = str(line_chart(chart))
    assert drawn.count('class="curve c0 dots"') == 2  # in the legend and in the picture


def test_chance_and_the_baseline_are_drawn_as_two_lines():
    from stoker.page.charts import Chart, Line, Mark, line_chart

    marks = [Mark("chance", 0.2), Mark("boosted trees", 0.8, is_dashed=True)]
    chart = Chart("key", "Validation", [Line("", [(1.0, 0.5), (2.0, 0.6)])], "", marks=marks)
    drawn = str(line_chart(chart))
    # Each in the legend and in the picture.
    assert drawn.count('class="limit"') == drawn.count('class="limit dashed"') == 2


def test_sixteen_bits_with_a_transparent_value_are_not_white(tmp_path):
    """Pillow turns such a picture into colours of 8 bits by clipping: all above 255 were white."""
    values = np.array([[0, 1000, 32768, 65535]], np.uint16)
    Image.fromarray(values).save(tmp_path / "a.png", transparency=1000)
    decoded = decode(tmp_path / "a.png")
    made = to_pixels(decoded, tmp_path / "a.png", (1, 4), 1)
    assert made.values.ravel().tolist() == [0, 255, 128, 255]


def test_signed_bytes_are_refused(tmp_path):
    Image.new("L", (4, 4), 200).save(tmp_path / "a.tif", tiffinfo={339: 2})
    with pytest.raises(SourceError, match="signed values of 8 bits"):
        decode(tmp_path / "a.tif")
