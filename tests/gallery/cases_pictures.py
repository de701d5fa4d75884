# ruff: noqa: E501  a table
"""Small pictures and masks of every kind and flaw, and what stoker does with each.

`test_gallery.py` makes the files, types the command and compares the outcome.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from gallery.case import GalleryCase

RNG = np.random.default_rng(7)


KIND = "Pictures and masks: `stoker pack images`, `stoker pack segmentation`"


def Case(  # noqa: N802  a row of the table
    what: str,
    make: Callable[[Path], object],
    words: str,
    does: str,
    packed: int | None = None,
    says: tuple[str, ...] = (),
    check: Callable[[Any], None] | None = None,
) -> GalleryCase:
    """Return a case; `packed` is None where the command is refused."""
    code = None if packed is None else 0
    typed = ["pack", *words.split()]
    return GalleryCase(
        what, does, make, name=".", code=code, says=says, words=typed, packed=packed, check=check
    )


def picture(
    path: Path, size: tuple[int, int] = (8, 6), value: int | None = None, **save: Any
) -> None:
    """Write an RGB picture, (height, width)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = RNG.integers(0, 256, (*size, 3), dtype=np.uint8)
    if value is not None:
        pixels[:] = value
    Image.fromarray(pixels).save(path, **save)


def mask(path: Path, values: Any = (0, 1), size: tuple[int, int] = (8, 6), **save: Any) -> None:
    """Write a mask whose left half is the first value; the other values follow to the right."""
    path.parent.mkdir(parents=True, exist_ok=True)
    steps = np.minimum(np.arange(size[1]) * len(values) // size[1], len(values) - 1)
    row = np.array(values)[steps]
    dtype = np.uint8 if row.max() < 256 else np.uint16
    Image.fromarray(np.tile(row, (size[0], *([1] * row.ndim)))[: size[0]].astype(dtype)).save(
        path, **save
    )


def classes(folder: Path, names: str = "cat dog", num: int = 3) -> None:
    for name in names.split():
        for number in range(num):
            picture(folder / name / f"{number}.png")


def pairs(
    folder: Path, values: Any = (0, 1), num: int = 3, image: str = "{}.png", label: str = "{}.png"
) -> None:
    for number in range(num):
        picture(folder / "images" / image.format(number))
        mask(folder / "masks" / label.format(number), values)


def _png16_rgb(path: Path, value: int) -> None:
    rows = b"".join(b"\0" + struct.pack(">H", value) * 18 for _ in range(8))

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    head = struct.pack(">IIBBBBB", 6, 8, 16, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


def _deep(folder: Path, values: Any, dtype: str, ending: str) -> None:
    for name in ("cat", "dog"):
        (folder / "in" / name).mkdir(parents=True)
        array = np.resize(np.array(values, dtype=dtype), (8, 6))
        Image.fromarray(array).save(folder / "in" / name / f"0.{ending}")


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def _turned(
    folder: Path,
    orientation: int,
    mask_exif: bool,
    upright_mask: bool,
    size: tuple[int, int] = (8, 6),
) -> None:
    """A picture with a white corner, top left when upright, and a mask of that corner."""
    upright = np.zeros((*size, 3), np.uint8)
    upright[: size[0] // 2, : size[1] // 2] = 255
    back = {
        3: Image.Transpose.ROTATE_180,
        6: Image.Transpose.ROTATE_90,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    stored = Image.fromarray(upright).transpose(back)
    (folder / "images").mkdir()
    (folder / "masks").mkdir()
    stored.save(folder / "images" / "0.png", exif=_exif(orientation))
    classes_ = Image.fromarray((upright[..., 0] > 0).astype(np.uint8))
    if upright_mask:
        classes_.save(folder / "masks" / "0.png")
    else:
        classes_.transpose(back).save(
            folder / "masks" / "0.png", **({"exif": _exif(orientation)} if mask_exif else {})
        )


def _overlap(store: Any) -> None:
    image = store.read_rows("images", 0, 1)[0, 0] > 127
    masked = store.read_rows("masks", 0, 1)[0] == 1
    assert image.any()
    assert (image == masked).all()


def _values(*expected: int) -> Callable[[Any], None]:
    def check(store: Any) -> None:
        assert store.manifest.attributes["mask_values"] == list(expected)
        assert np.unique(store.read_rows("masks", 0, store.num_samples)).tolist() == list(expected)

    return check


def _pixels(low: int, high: int) -> Callable[[Any], None]:
    def check(store: Any) -> None:
        images = store.read_rows("images", 0, store.num_samples)
        assert (int(images.min()), int(images.max())) == (low, high)

    return check


def _class_names(*names: str) -> Callable[[Any], None]:
    def check(store: Any) -> None:
        assert store.manifest.attributes["classes"] == list(names)

    return check


def _splits(*numbers: int) -> Callable[[Any], None]:
    def check(store: Any) -> None:
        assert sorted(store.read_rows("split", 0, store.num_samples).tolist()) == sorted(numbers)

    return check


def _ignored(**counts: int) -> Callable[[Any], None]:
    def check(store: Any) -> None:
        found = store.manifest.counts["ignored"]
        assert {key: found.get(key.replace("_", " ")) for key in counts} == counts

    return check


def _with(*makers: Callable[[Path], None]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for maker in makers:
            maker(folder)

    return make


def _in(folder: Path) -> None:
    classes(folder / "in")


def _write(name: str, text: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    return make


def _saved(mode: str, name: str, value: Any, **info: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "in" / "cat").mkdir(parents=True, exist_ok=True)
        Image.new(mode, (6, 8), value).save(folder / "in" / "cat" / name, **info)

    return make


def _palette(folder: Path) -> None:
    (folder / "in" / "cat").mkdir(parents=True)
    image = Image.new("P", (6, 8), 3)
    image.putpalette([0, 0, 0] * 3 + [10, 20, 30] + [0, 0, 0] * 252)
    image.save(folder / "in" / "cat" / "0.png")


def _frames(folder: Path) -> None:
    frames = [Image.new("L", (6, 8), value) for value in (9, 20, 30)]
    (folder / "in" / "cat").mkdir(parents=True)
    frames[0].save(folder / "in" / "cat" / "stack.tif", save_all=True, append_images=frames[1:])
    picture(folder / "in" / "dog" / "0.png")


def _colours(folder: Path, names: int = 2) -> None:
    for number in range(2):
        picture(folder / "images" / f"{number}.png")
        mask(folder / "masks" / f"{number}.png", [(0, 0, 0), (128, 0, 0), (0, 128, 0)][: names + 1])


def _objects(folder: Path) -> None:
    for number in range(2):
        picture(folder / "images" / f"{number}.png")
        for piece in range(2):
            values = [0, 0, 0]
            values[piece] = 255
            mask(folder / "masks" / str(number) / f"{piece}.png", values)


def _nuclei(folder: Path) -> None:
    for name in ("a1", "b2"):
        picture(folder / "data" / name / "images" / f"{name}.png")
        for piece in range(3):
            mask(folder / "data" / name / "masks" / f"{piece}.png", (0, 255))


IMAGES = "images in out --size 8x6 -j 1"
MASKS = "segmentation out --images images --masks masks --size 8x6 -j 1"

CASES = [
    # -- values ------------------------------------------------------------------------------------
    Case("8-bit RGB in class folders", _in, IMAGES, "stored as it is", 6, ("6 pictures found = 6 packed",), _class_names("cat", "dog")),
    Case("16-bit grey", lambda f: _deep(f, [0, 65535], "u2", "png"), IMAGES, "0 to 65535 becomes 0 to 255, said", 2,
         ("2 16-bit pictures with values 0 to 65535",), _pixels(0, 255)),
    Case("12-bit values in 16-bit files", lambda f: _deep(f, [0, 4095], "u2", "tif"), IMAGES,
         "scaled by the type, with the range to give", 2, ("--range 0,4095",), _pixels(0, 16)),
    Case("12-bit values with their range", lambda f: _deep(f, [0, 4095], "u2", "tif"), IMAGES + " --range 0,4095",
         "0 to 4095 becomes 0 to 255", 2, ("0 to 4095 became 0 to 255",), _pixels(0, 255)),
    Case("16-bit RGB", _with(_in, lambda f: _png16_rgb(f / "in" / "cat" / "deep.png", 40000)), IMAGES,
         "the upper 8 bits, said", 7, ("1 colour pictures of 16 bits a channel",)),
    Case("16-bit RGB with a range", _with(_in, lambda f: _png16_rgb(f / "in" / "cat" / "deep.png", 40000)),
         IMAGES + " --range 0,4095", "refused", None, ("leave --range out",)),
    Case("float from 0 to 1", lambda f: _deep(f, [0.0, 1.0], "f4", "tif"), IMAGES, "0 to 1 becomes 0 to 255, said", 2,
         ("2 float pictures with values 0 to 1",), _pixels(0, 255)),
    Case("float beyond 0 to 1", lambda f: _deep(f, [-5.0, 300.0], "f4", "tif"), IMAGES, "refused, with the range to give",
         None, ("holds float values from -5 to 300", "--range -5,300")),
    Case("float with its range", lambda f: _deep(f, [-5.0, 300.0], "f4", "tif"), IMAGES + " --range -5,300",
         "LOW to HIGH becomes 0 to 255", 2, (), _pixels(0, 255)),
    Case("float with NaN", lambda f: _deep(f, [0.0, np.nan], "f4", "tif"), IMAGES, "refused", None, ("not finite",)),
    Case("32-bit whole numbers", lambda f: _deep(f, [0, 70000], "i4", "tif"), IMAGES, "refused, with the range to give",
         None, ("holds 32-bit values from 0 to 70000", "--range 0,70000")),
    Case("palette", _palette, IMAGES, "the palette's colours", 1, (), _pixels(10, 30)),
    Case("RGBA", _saved("RGBA", "0.png", (0, 0, 0, 0)), IMAGES, "laid over white, said", 1,
         ("1 pictures with transparency are laid over white",), _pixels(255, 255)),
    Case("CMYK", _saved("CMYK", "0.jpg", (0, 255, 255, 0), quality=95), IMAGES, "converted, said", 1,
         ("1 CMYK pictures are converted",)),
    Case("1 bit", _saved("1", "0.png", 1), IMAGES, "0 and 255", 1, (), _pixels(255, 255)),
    Case("Lab", _with(_in, _saved("LAB", "lab.tif", (1, 2, 3))), IMAGES, "refused", None, ("is in Lab colours",)),
    Case("several frames in one TIFF", _frames, IMAGES, "refused, with the option", None,
         ("stack.tif: holds 3 frames", "--first-frame")),
    Case("several frames, the first", _frames, IMAGES + " --first-frame", "the first frame", 2),
    Case("cut off or damaged", _with(_in, _write("in/cat/bad.png", "x")), IMAGES, "refused by name", None,
         ("bad.png: cannot be opened", "--on-bad quarantine")),
    # -- EXIF --------------------------------------------------------------------------------------
    Case("EXIF in image and mask", lambda f: _turned(f, 6, True, False), MASKS, "both turned upright, said", 1,
         ("1 pictures were turned upright",), _overlap),
    Case("EXIF in the image, mask drawn on the stored pixels", lambda f: _turned(f, 6, False, False), MASKS,
         "the sizes tell: the mask is turned too", 1, (), _overlap),
    Case("EXIF in the image, mask drawn upright", lambda f: _turned(f, 8, False, True), MASKS,
         "the sizes tell: the mask stays", 1, (), _overlap),
    Case("EXIF in the image, sizes tell nothing", lambda f: _turned(f, 3, False, False), MASKS,
         "refused, with the option", None, ("orientation 3", "--mask-orientation image")),
    Case("the same with the option", lambda f: _turned(f, 3, False, False), MASKS + " --mask-orientation image",
         "turned like the image", 1, (), _overlap),
    Case("the same, mask drawn upright", lambda f: _turned(f, 3, False, True), MASKS + " --mask-orientation upright",
         "stays as it is", 1, (), _overlap),
    Case("square picture with EXIF", lambda f: _turned(f, 6, False, False, (8, 8)), MASKS.replace("8x6", "8x8"),
         "refused, with the option", None, ("--mask-orientation image",)),
    # -- mask values -------------------------------------------------------------------------------
    Case("masks of classes", lambda f: pairs(f, (0, 1, 2)), MASKS, "as they are", 3, (), _values(0, 1, 2)),
    Case("masks of 0 and 255", lambda f: pairs(f, (0, 255)), MASKS, "255 becomes class 1, said", 3,
         ("255 is stored as class 1",), _values(0, 1)),
    Case("masks of 0 and 255, kept", lambda f: pairs(f, (0, 255)), MASKS + " --mask-map keep",
         "255 stays, and counts nowhere, said", 3, ("mask value 255 (50.0% of the pixels) counts nowhere",), _values(0, 255)),
    Case("255 beside classes", lambda f: pairs(f, (0, 1, 255)), MASKS, "255 counts nowhere in training, said", 3,
         ("counts nowhere in training",), _values(0, 1, 255)),
    Case("0 and 255, and one mask with 2", _with(lambda f: pairs(f, (0, 255), 40), lambda f: mask(f / "masks" / "9.png", (0, 2))),
         MASKS, "refused, with the map", None, ("9.png holds the value 2", "--mask-map 255=1,2=2")),
    Case("grey levels 0, 128, 255", lambda f: pairs(f, (0, 128, 255)), MASKS, "refused, with the map", None,
         ("look like grey levels", "--mask-map 0=0,128=1,255=2")),
    Case("grey levels with a map", lambda f: pairs(f, (0, 128, 255)), MASKS + " --mask-map 128=1,255=2", "mapped", 3, (),
         _values(0, 1, 2)),
    Case("a map onto a value that is there", lambda f: pairs(f, (0, 1, 255)), MASKS + " --mask-map 255=1",
         "refused: say 1=1 too", None, ("holds the value 1", "--mask-map 1=1")),
    Case("JPEG masks", lambda f: pairs(f, (0, 255), label="{}.jpg"), MASKS, "refused, with ranges", None,
         ("is a JPEG", "--mask-map 0-127=0,128-255=1")),
    Case("JPEG masks with ranges", lambda f: pairs(f, (0, 255), label="{}.jpg"), MASKS + " --mask-map 0-127=0,128-255=1",
         "mapped", 3, (), _values(0, 1)),
    Case("values above 255", lambda f: pairs(f, (0, 700)), MASKS, "refused, with the map", None,
         ("holds the value 700", "--mask-map 700=1")),
    Case("coloured masks", _colours, MASKS, "refused, with the colours found", None,
         ("has 3 colours", "#800000", "--mask-map")),
    Case("coloured masks with a map", _colours, MASKS + " --mask-map #000000=0,#800000=1,#008000=2", "mapped", 2, (),
         _values(0, 1, 2)),
    Case("coloured masks with a table", _with(_colours, _write("colors.csv", "name,r,g,b\nvoid,0,0,0\nred,128,0,0\ngreen,0,128,0\n")),
         MASKS + " --mask-colors colors.csv", "mapped, with class names", 2, (), _class_names("void", "red", "green")),
    Case("a colour that the table lacks", _with(_colours, _write("colors.txt", "0 0 0 void\n128 0 0 red\n")),
         MASKS + " --mask-colors colors.txt", "refused by name", None, ("the colour #008000", "--mask-map other=255")),
    Case("a colour that the table lacks, named other", _with(_colours, _write("colors.txt", "0 0 0 void\n128 0 0 red\n")),
         MASKS + " --mask-colors colors.txt --mask-map other=255", "255", 2, (), _values(0, 1, 255)),
    Case("grey masks saved as RGB", lambda f: pairs(f, [(0, 0, 0), (1, 1, 1)]), MASKS, "the grey value", 3, (), _values(0, 1)),
    Case("one mask per object, in folders", _objects, MASKS, "joined: 1 inside any object, said", 2,
         ("2 pictures have one mask per object",), _values(0, 1)),
    Case("one mask per object, x/images and x/masks", _nuclei, "segmentation out --images data --masks data --size 8x6 -j 1",
         "joined, said", 2, ("one mask per object",), _values(0, 1)),
    Case("mask of another size", _with(pairs, lambda f: mask(f / "masks" / "1.png", size=(9, 6))), MASKS,
         "refused by name", None, ("1.png is (6, 9) but its image is (6, 8)",)),
    # -- names -------------------------------------------------------------------------------------
    Case("x.png and x_L.png", lambda f: pairs(f, label="{}_L.png"), MASKS, "refused, with the suffix", None,
         ("no image has a mask of its name", "--mask-suffix _L")),
    Case("x.png and x_L.png with the suffix", lambda f: pairs(f, label="{}_L.png"), MASKS + " --mask-suffix _L", "paired", 3),
    Case("a_left.png and a_gt_ids.png", lambda f: pairs(f, image="aa{}_left.png", label="aa{}_gt_ids.png"), MASKS,
         "refused, with both suffixes", None, ("--mask-suffix _gt_ids --image-suffix _left",)),
    Case("masks with a prefix", lambda f: pairs(f, label="mask_{}.png"), MASKS, "refused, with the prefix", None,
         ("--mask-prefix mask_",)),
    Case("images and masks in one folder",
         lambda f: [(picture(f / "all" / f"{n}.png"), mask(f / "all" / f"{n}_mask.png")) for n in range(3)] and None,
         "segmentation out --images all --masks all --mask-suffix _mask --size 8x6 -j 1", "paired", 3),
    Case("an image without a mask", _with(pairs, lambda f: picture(f / "images" / "alone.png")), MASKS,
         "refused by name", None, ("alone.png: there is no mask of this name",)),
    Case("a.jpg and a.png with one mask", _with(pairs, lambda f: picture(f / "images" / "1.jpg")), MASKS,
         "both refused by name", None, ("1.jpg: 1.png has the same name", "1.png: 1.jpg has the same name")),
    Case("nested folders", lambda f: [(picture(f / "images" / c / "1.png"), mask(f / "masks" / c / "1.png")) for c in "ab"] and None,
         MASKS, "paired by their paths", 2),
    Case("train and val folders of masks",
         lambda f: [(picture(f / "images" / c / "1.png"), mask(f / "masks" / c / "1.png")) for c in ("train", "val")] and None,
         MASKS, "paired; the folders are splits, said", 2, ("are taken as splits",), _splits(0, 1)),
    Case("lists of splits", _with(pairs, _write("train.txt", "0\n1\n"), _write("val.txt", "2.png\n")),
         MASKS + " --list train=train.txt --list val=val.txt", "the lists decide", 3, (), _splits(0, 0, 1)),
    Case("lists that leave pictures out", _with(pairs, _write("train.txt", "0\n1\n")),
         MASKS + " --list train=train.txt", "counted as ignored", 2, ("ignored 1: in no list",)),
    # -- folders -----------------------------------------------------------------------------------
    Case("hidden and system files", _with(_in, lambda f: classes(f / "in" / ".ipynb_checkpoints", "x", 2),
         lambda f: classes(f / "in" / "__MACOSX", "cat", 1), _write("in/cat/._0.png", "x"), _write("in/.DS_Store", "x")), IMAGES,
         "ignored and counted; no classes", 6, ("ignored 5: hidden or system file",), _class_names("cat", "dog")),
    Case("files of other endings", _with(_in, _write("in/cat/notes.txt", "x"), _write("in/dog/a.npy", "x")), IMAGES,
         "ignored and counted by ending", 6, ("ignored 1: not a picture (.txt)", "ignored 1: not a picture (.npy)")),
    Case("an empty class folder", _with(_in, lambda f: (f / "in" / "eel").mkdir()), IMAGES, "no class, named", 6,
         ("class folders without pictures are no classes: eel",), _class_names("cat", "dog")),
    Case("folders inside class folders", _with(_in, lambda f: picture(f / "in" / "cat" / "more" / "9.png")), IMAGES,
         "taken; the class is the first folder, said", 7, ("1 pictures lie deeper",)),
    Case("pictures beside class folders", _with(_in, lambda f: picture(f / "in" / "loose.png")), IMAGES,
         "ignored and counted", 6, ("ignored 1: outside the class folders",)),
    Case("train, val and test folders", lambda f: [classes(f / "in" / s, num=2) for s in ("train", "val", "test")] and None,
         IMAGES, "splits, said", 12, ("are taken as splits",), _splits(*[0, 1, 2] * 4)),
    Case("train beside other classes", lambda f: classes(f / "in", "train car"), IMAGES, "a class", 6, (),
         _class_names("car", "train")),
    Case("one folder too high", lambda f: classes(f / "in" / "data"), IMAGES, "refused, with the folder", None,
         ("its folder 'data'", "stoker pack images in/data OUT")),
    Case("a flat folder", lambda f: picture(f / "in" / "0.png"), IMAGES, "refused, with the option", None,
         ("no class folders and 1 pictures", "--labels FILE.csv")),
    Case("a flat folder with a CSV of labels",
         _with(lambda f: [picture(f / "in" / f"{n}.jpg") for n in range(3)] and None,
               _write("labels.csv", "id,breed\n0,pug\n1,boxer\n2,pug\n")),
         IMAGES + " --labels labels.csv", "labels by name, with or without ending", 3, ("labels from column 'breed'",),
         _class_names("boxer", "pug")),
    Case("a CSV with several columns",
         _with(lambda f: [picture(f / "in" / f"{n}.jpg") for n in range(3)] and None,
               _write("labels.csv", "file;age;sex\n0.jpg;1;m\n1.jpg;2;f\n2.jpg;3;f\n")),
         IMAGES + " --labels labels.csv", "refused, with the option", None, ("several may be the label", "--label-column age")),
    Case("a CSV with one column of 0 and 1 a class",
         _with(lambda f: [picture(f / "in" / f"{n}.jpg") for n in range(2)] and None,
               _write("labels.csv", "image,MEL,NV\n0,1.0,0.0\n1,0.0,1.0\n")),
         IMAGES + " --labels labels.csv", "the columns are the classes, said", 2, ("one column of 0 and 1 a class",),
         _class_names("MEL", "NV")),
    Case("a CSV with a split column",
         _with(lambda f: [picture(f / "in" / f"{n}.jpg") for n in range(2)] and None,
               _write("labels.csv", "image,label,split\n0,a,train\n1,b,test\n")),
         IMAGES + " --labels labels.csv", "label and split, said", 2, ("the split is that of column 'split'",), _splits(0, 2)),
    Case("a CSV that names missing pictures",
         _with(lambda f: picture(f / "in" / "0.jpg"), _write("labels.csv", "image,label\n0,a\n7,b\n")),
         IMAGES + " --labels labels.csv", "the line is refused", None, ("labels.csv:3: there is no picture '7'",)),
    Case("nothing but damaged files, with any budget", _write("in/cat/bad.png", "x"),
         IMAGES + " --on-bad quarantine --bad-budget 100%", "refused: no sample is left", None, ("no sample is left",)),
]  # fmt: skip
