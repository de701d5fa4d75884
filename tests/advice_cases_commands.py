# ruff: noqa: E501  a table: one case or advice a line
"""Commands that are refused, by the part of the package that refuses them."""

from __future__ import annotations

from dataclasses import replace

from advice_typing import Case
from stoker.config.tree import key_schemas

ON_CPU = ["--device", "cpu"]
PREVIEW = ["augment", "preview", "pictures/cat", "x.png"]
TRAIN = ["train", "--config", "tabular.yaml", *ON_CPU]
BARS = [
    "pack",
    "bars",
    "bars/EURUSD_M5.csv",
    "bars/EURUSD_H1.csv",
    "made",
    "--windows",
    "M5=8,H1=4",
]

MINE = ["train", "--set", "training.epochs=1", "--store", "rows", *ON_CPU, "--set"]
FOREX = ["train", "--set", "recipe.name=forex", *ON_CPU, "--store"]
TWO = {"FOLDER": "bars", "M5=288,H1=96": "M5=8,H1=4"}
# The recipe of docs/extending.md, with mistakes in it, as a module of its own: Python remembers modules.
OWN = """
page = (Path(stoker.__file__).parent.parent.parent / 'docs' / 'extending.md').read_text()
code = page.partition('## A recipe of your own')[2].partition('```python')[2].partition('```')[0]
def own(name, old='', new='', folder='.'):
    assert old in code
    Path(folder).mkdir(exist_ok=True)
    (Path(folder) / f'{name}.py').write_text(code.replace(old, new, 1))
write_store(Path('rows'), [{'x': Dense(np.zeros((30, 6), 'f4'))}]).close()
"""
PART = "from test_recipe_forex import make_fields; write_store(Path('part'), [{name: field for name, field in make_fields(200).items() if name not in %s}]).close()"
CHECK = ["config", "check", "config.yaml", "--set"]


def _wrong_values() -> list[Case]:
    """Return every key of a config with values of other types, out of range and misspelt."""
    cases = []
    for key, schema in key_schemas().items():
        kinds = {option.get("type") for option in [schema, *schema.get("anyOf", [])]}
        wrong = ["[1, 2]"]
        if kinds & {"integer", "number"}:
            wrong += ["-7", "x", "1e300"]
        elif "boolean" in kinds or any("enum" in one for one in [schema, *schema.get("anyOf", [])]):
            wrong += ["x"]
        for value in wrong if key != "recipe.options" else ["3"]:
            # A number of batches to prefetch is right only where there are workers.
            beside = ["--set", "data.num_workers=2"] if "prefetch" in key else []
            cases.append(Case([*CHECK[:-1], *beside, "--set", f"{key}={value}"]))
    return cases


def _tables() -> list[Case]:
    """Return tables of which each is refused, with what `pack table` says about it."""
    made = {
        "semi.csv": "a;b\n" + "1,5;2\n3,5;4\n",
        "years.csv": "country,2019,2020\nA,1,2\nB,3,4\nA,5,6\n",
        "people.csv": "name,age\n" + "".join(f"p{n},{n or ''}\n" for n in range(20)),
        "mixed.csv": "a,b\n" + "1,2\n" * 9000 + "1,x\n" * 9000,
    }
    table = ["pack", "table"]
    cases = [
        Case([*table, "semi.csv", "made", "--sep", "xx"]),
        Case([*table, "semi.csv", "made", "--decimal", "x"]),
        Case([*table, "table.csv", "made", "--encoding", "x"]),
        Case([*table, "years.csv", "made"]),
        Case([*table, "people.csv", "made"]),
        Case([*table, "table.csv", "made", "--drop", "B", "--target", "Label"]),
        Case([*table, "table.csv", "made", "--drop", "zzz"]),
        Case([*table, "table.csv", "made", "--dtype", "x"], fill={"NAME=category": "a=codes"}),
        Case([*table, "none/none*.csv", "made"]),
        Case([*table, "empty", "made"]),
        Case([*table, "nothing.csv", "made"], "open('nothing.csv', 'w')"),
        Case([*table, "sep.csv", "made"], "open('sep.csv', 'w').write('sep=;' + chr(10))"),
        Case([*table, "zero.csv", "made"], "open('zero.csv', 'wb').write(bytes(99))"),
        Case([*table, "endless.csv", "made"], "open('endless.csv', 'w').write('a' * 300_000)"),
        Case([*table, "cut.parquet", "made"], "open('cut.parquet', 'wb').write(b'PAR1xxxxPAR1')"),
        Case([*table, "book.xlsx", "made"], "import zipfile; zipfile.ZipFile('book.xlsx', 'w').writestr('a', 'b')"),
        Case([*table, "late.csv", "made"], "open('late.csv', 'wb').write(b'a,b' + b'\\n1,2' * 90_000 + b'\\n1,\\xe9\\n')", then="not a number"),
        Case([*table, "e.csv", "made", "--encoding", "utf-8"], "open('e.csv', 'wb').write(b'a,b\\n1,\\xe9\\n2,x\\n')"),
        Case([*table, "u.csv", "made", "--encoding", "ascii"], "open('u.csv', 'wb').write(b'a,b' + b'\\n1,2' * 90_000 + b'\\n1,\\xe9\\n')", then="not a number"),
        Case([*table, "mixed.csv", "made"], "open('mixed.csv', 'w').write('a,b' + chr(10) + ('1,2' + chr(10)) * 200_000 + ('1,x' + chr(10)) * 9)", then="differ"),
        Case([*table, "wide.csv", "made"], "open('wide.csv', 'w').write('a,b' + chr(10) + ('1,9000000.5' + chr(10)) * 200_000 + ('1,16777217' + chr(10)) * 9)"),
    ]  # fmt: skip
    setup = {
        name: f"open({name!r}, 'w').write({text!r})"
        for name, text in made.items()
        if len(text) < 1000
    }
    return [replace(case, setup=case.setup or setup.get(case.wrong[2], "")) for case in cases]


COMMANDS: dict[str, list[Case]] = {
    "augment": [
        Case(["augment", "preview", "none/none", "x.png"]),
        Case(["augment", "preview", "empty", "x.png"]),
        Case(["augment", "preview", "pictures/cat", "x.png", "--masks", "masks/cat/0.png"]),
        Case(["augment", "preview", "pictures/cat", "x.png", "--masks", "masks"]),
        Case(["augment", "preview", "store", "x.png"], at="store", fill={"store": "seg-store"}),
        Case(["augment", "preview", "seg-store", "x.png", "--size", "8x8"]),
        Case(["augment", "preview", "seg-store", "x.png", "--masks", "masks"]),
        Case(["augment", "preview", "none-store", "x.png"], "write_store(Path('none-store'), [{'images': Dense(np.zeros((0, 3, 8, 8), 'u1'))}]).close()"),
        Case(["augment", "preview", "pictures/cat", "x.png", "--masks", "masks/dog"], "import os; os.remove('masks/dog/0.png')"),
        Case(["augment", "preview", "pictures/cat", "empty"], at="empty"),
        Case(["augment", "preview", "pictures/cat", "x.jpg"], at="x.jpg"),
        Case(["augment", "preview", "pictures/cat", "none/none/x.png"]),
        Case(["augment", "preview", "pictures/cat", "x.png"], "open('x.png', 'w').write('x')", at="x.png"),
        Case(["augment", "preview", "pictures/cat", "pictures/cat/x.png"], at="pictures/cat/x.png"),
    ],
    "cli": [
        Case(["pack", "images", "pictures", "made", "--size", "16x16", "--keep-encoded"]),
        Case(["pack", "images", "pictures", "made", "--max-side", "8"]),
        Case(["inspect", "table.csv", "--rows", "4"]),
        Case(["pack", "table", "table.csv", "made", "--missing", "x"]),
        Case([*PREVIEW, "--size", "1x1"]),
        Case([*PREVIEW, "--preset", "none"]),
        Case([*PREVIEW, "--rows", "0"]),
        Case([*PREVIEW, "--preset", "strong", "--config", "aug.yaml"], "open('aug.yaml', 'w').write('training: {use_gpu_augmentation: true}')"),
        Case([*PREVIEW, "--config", "config.yaml"]),
        Case(["bench", "memory"]),
        Case(["bench", "memory", "--msp", "library.msp", "--ram-gb", "0"]),
        Case(["doctor"]),
        Case(["doctor", "--set", "training.lr=1", "--", "python", "train.py"], "open('train.py', 'w').write('')"),
        Case(["doctor", "explain", "nothing"]),
        Case(["doctor", "--pid", "1", "--", "python", "train.py"], then="cannot be looked at"),
        Case(["doctor", "--json", "--", "python", "train.py"], "open('train.py', 'w').write('')"),
        Case(["export", "run/best.pt", "out.safetensors", "--opset", "18"], at="out.safetensors"),
        Case(["export", "run/best.pt", "out.onnx", "--batch", "x"]),
        Case(["export", "run/best.pt", "q.onnx", "--int8"], at="q.onnx"),
        Case(["export", "run/best.pt", "q.pt", "--int8", "--opset", "18", "--size", "8x8"]),
        Case(["export", "run/best.pt", "q.onnx", "--store", "store", "--split", "val"]),
        Case(["config", "migrate", "config.yaml", "none/new.yaml"]),
        Case(["monitor", "--interval", "0", "--once"]),
        Case(["monitor", "none/none", "--once"]),
        Case(["inspect", "table.csv", "--html", "empty"]),
        Case(["inspect", "table.csv", "--as", "x"]),
        Case(["inspect", "table.csv", "--html", "none/none/x.html"]),
        Case(["inspect", "table.csv", "--html", "table.csv"]),
        Case(["tune", "--config", "tabular.yaml", "--out", "config.yaml", *ON_CPU]),
        Case(["pack", "table", "table.csv"], "pass", at="table.csv"),
        Case(["pack", "table", "table.csv", "made", "--split", "x"]),
        Case([*BARS, "--split-at", "2020"]),
        Case(["plan"]),
        Case(["plan", "store", "--gpu-memory", "16GB", "--parameters", "x"]),
        Case(["plan", "store", "--gpu-memory", "16GB", "--activations", "2MB"]),
        Case(["profile"]),
        Case(["quantize", "run/best.pt", "q8.pt"]),
        Case(["migrate-config", "config.yaml", "new.yaml"]),
        Case(["train", "--config", "tabular.yaml", "--gpus", "16"]),
        Case([*TRAIN, "--gpus", "99"], then=""),
        Case(["train", "--config", "tabular.yaml", "--msp", "library.msp"]),
        Case(["tune"]),
        Case(["config", "migrate", "config.yaml", "tabular.yaml"], at="tabular.yaml"),
    ],
    "packing": [
        Case(["pack", "table", "dirty.csv", "made"]),
        Case(["pack", "table", "table.csv", "made", "--jobs", "-1"]),
        Case(["pack", "table", "table.csv", "made", "--on-bad", "x"]),
        Case(["pack", "images", "few", "made", "--size", "8x8"], "import os; os.makedirs('few/cat')"),
        Case(["pack", "images", "pictures", "made", "--size", "8x8"], "open('pictures/cat/0.png', 'w').write('x')"),
        Case(["pack", "images", "pictures", "made", "--size", "8x8", "--on-bad", "quarantine", "--bad-budget", "1%"],
             "open('pictures/cat/0.png', 'w').write('x')"),
        Case(["pack", "segmentation", "--images", "pictures/cat", "--masks", "masks/cat", "made", "--size", "16x16", "--on-bad", "quarantine", "--bad-budget", "100%"],
             "from PIL import Image; [(Image.open('masks/cat/%d.png' % n).save('masks/cat/%d.jpg' % n), Path('masks/cat/%d.png' % n).unlink()) for n in range(3)]"),
        Case(["pack", "arrays", "b.npy", "made", "--repair", "clip"]),
        Case(["pack", "table", "table.csv", "link"], "import os; os.symlink('new-folder', 'link')"),
        Case(["pack", "images", "pictures", "pictures/out", "--size", "8x8"], at="pictures/out"),
        Case(["pack", "table", "sub/table.csv", "sub"], "import os; os.mkdir('sub'); os.rename('table.csv', 'sub/table.csv')", at="sub"),
    ],
    "plan": [
        Case(["plan", "store", "--gpu-memory", "2GB", "--ram", "8GB", "--parameters", "1M", "--activations", "10MB", "--batch-size", "4096"]),
        Case(["plan", "store", "--gpu-memory", "16GB", "--optimizer", "x"], at="x"),
        Case(["plan", "store", "--gpu-memory", "16GB"], "write_store(Path('store'), [{'a': Dense(np.zeros((0, 3), 'f4'))}])", fill={"STORE": "plain-store"}),
    ],
    "sources": [
        Case(["pack", "images", "pictures", "made", "--keep-encoded", "--max-side", "0"]),
        Case(["pack", "images", "pictures", "made", "--keep-encoded", "--quality", "0"]),
        Case(["pack", "images", "pictures", "made", "--keep-encoded"], "from PIL import Image; Image.new('RGB', (16, 16)).save('pictures/cat/new.jpg', progressive=True)"),
        Case(["pack", "arrays", "two.npz", "made", "--names", "a"]),
        Case(["pack", "series", "a.npy", "made", "--window", "0", "--stride", "0"]),
        Case(["pack", "series", "table.csv", "made", "--window", "4", "--dtype", "uint88"]),
        Case(["pack", "series", "a.npy", "made", "--window", "400"]),
        Case(["pack", "series", "a.npy", "made", "--window", "4", "--time-column", "x"]),
        Case(["pack", "series", "two.npz", "made", "--window", "2"]),
        Case(["pack", "series", "c.npy", "made", "--window", "2"], "np.save('c.npy', np.zeros((9, 2, 2), 'f4'))"),
        Case(["pack", "series", "a.npy", "made", "--window", "4", "--dtype", "uint8"]),
        Case(["pack", "series", "note.txt", "made", "--window", "4"], "open('note.txt', 'w').write('hello, hello')"),
        Case(["pack", "series", "note.bin", "made", "--window", "4", "--dtype", "uint16"], "open('note.bin', 'w').write('hello')"),
        Case(["pack", "series", "table.csv", "made", "--window", "4", "--columns", "c"]),
        Case(["pack", "series", "words.csv", "made", "--window", "2"], "open('words.csv', 'w').write('a,b\\n1,u\\n3,v\\n5,w\\n')"),
        Case(["pack", "series", "table.csv", "made", "--window", "4", "--columns", "a", "--time-column", "label"]),
        Case(["pack", "arrays", "two.npz", "a.npy", "made", "--rows", "4"]),
        Case(["inspect", "uneven.npz"], "np.savez('uneven.npz', a=np.eye(9)[:, :3], b=np.ones(4))"),
        Case(["pack", "bars", "bars.csv", "made", "--windows", "M5=8"], "import shutil; shutil.copy('bars/EURUSD_M5.csv', 'bars.csv')", at="bars.csv"),
        Case([*BARS, "--horizon", "0"]),
        Case([*BARS[:-1], "x"], fill={"M5=288,H1=96": "M5=28,H1=9"}),
        Case([*BARS[:-1], ""], fill={"M5=288,H1=96": "M5=28,H1=9"}), Case([*BARS[:-1], "X1=3"], at="X1=3", fill={"M5": "M5=3"}), Case([*BARS[:-1], "M5=8,H1=4,H4=2"]),
        Case([*BARS, "--base", "M15"], then="M15"),
        Case([*BARS, "--split-at", "2020-10-02,2020-09-01"]),
        Case([*BARS, "--split-at", "a,b"]),
        Case([*BARS, "--tz", "Mars/Base"]),
        Case(["pack", "bars", "bad_M5.csv.gz", "made", "--windows", "M5=8"]),
        Case(["pack", "bars", "bars/EURUSD_M5.csv", "made", "--windows", "M5=8"],
             "p = Path('bars/EURUSD_M5.csv'); lines = p.read_text().splitlines(); p.write_text(chr(10).join([lines[0], *lines[900:], *lines[1:900]]))"),
        Case(["pack", "bars", "bars/EURUSD_M5.csv", "made", "--windows", "M5=8", "--tz", "Europe/Athens"],
             "p = Path('bars/EURUSD_M5.csv'); p.write_text(__import__('re').sub('(2020[^,]*)', r'\\1+00:00', p.read_text()).replace('.', '-', 0))"),
        Case(["pack", "bars", "days_M5.csv", "made", "--windows", "M5=8"],
             "open('days_M5.csv', 'w').write(chr(10).join(f'0{d}/0{m}/2020 {h:02d}:{n:02d},1,2,0.5,1' for m in (5,) for d in (5,) for h in range(24) for n in range(0, 60, 5)))"),
        Case(["pack", "images", "pictures", "made", "--size", "x"]),
        Case(["pack", "images", "pictures", "made", "--size", "0x0"]),
        Case(["pack", "images", "pictures", "made", "--size", "8x8", "--channels", "2"]),
        Case(["pack", "images", "none/none", "made", "--size", "8x8"]),
        Case(["pack", "images", "empty", "made", "--size", "8x8"]),
        Case(["pack", "images", "pictures", "made", "--size", "8x8", "--range", "x"]),
        Case(["pack", "images", "pictures", "made", "--size", "8x8", "--list", "x"], "open('train.txt', 'w').write('cat/0.png')"),
        Case(["pack", "images", "pictures", "made", "--size", "8x8", "--labels", "few.csv"], "open('few.csv', 'w').write('a')"),
        Case(["pack", "images", "pictures", "made", "--size", "8x8", "--labels", "few.csv"], "open('few.csv', 'w').write('a,b\\nx,y\\n')"),
        Case(["pack", "images", "pictures", "made", "--size", "8x8", "--labels", "few.csv"], "open('few.csv', 'w').write('a,b\\nx\\n')"),
        Case(["pack", "images", "pictures", "made", "--size", "8x8", "--labels", "few.csv"], "open('few.csv', 'w').write('a,b\\n\\x22x')"),
        Case(["pack", "images", "pictures", "made", "--size", "8x8", "--labels", "few.csv", "--label-column", "x"],
             "open('few.csv', 'w').write('a,b\\ncat/0.png,1\\n')"),
        Case(["pack", "images", "pictures", "made", "--size", "8x8", "--labels", "few.csv"], "open('few.csv', 'w').write('a,b,c\\ncat/0.png,1,2\\n')"),
        Case(["pack", "images", "pictures", "made", "--size", "8x8"], "import os; os.rename('pictures', 'x'); os.mkdir('pictures'); os.rename('x', 'pictures/x')"),
        Case(["pack", "images", "pictures/cat", "made", "--size", "8x8"]),
        Case(["pack", "images", "pictures", "made", "--size", "8x8"], "from PIL import Image; [Image.fromarray(np.full((8, 8), 7, 'f4')).save('pictures/cat/%d.tif' % n) for n in range(9)]"),
        Case(["pack", "images", "one", "made", "--size", "8x8"],
             "from PIL import Image; Path('one/cat').mkdir(parents=True); Image.new('L', (8, 8)).save('one/cat/x.tif', save_all=True, append_images=[Image.new('L', (8, 8), 1)])"),
        Case(["pack", "images", "few", "made", "--size", "8x8"], "Path('few/cat').mkdir(parents=True); Path('few/cat/x.txt').write_text('x')"),
        Case(["pack", "segmentation", "--images", "pictures/cat", "--masks", "masks/cat", "made", "--size", "16x16", "--mask-colors", "few.txt"],
             "from PIL import Image; open('few.txt', 'w').write('1 2 3 x'); [Image.new('RGB', (16, 16), (n, 9, 8)).save('masks/cat/%d.png' % n) for n in range(3)]"),
        Case(["pack", "segmentation", "--images", "i", "--masks", "m", "made", "--size", "4x4"],
             "from PIL import Image; [(Path(f).mkdir(), [Image.fromarray(np.uint8([[0, 2 if n == 30 else 255]])).save(f + '/%d.png' % n) for n in range(40)]) for f in 'im']"),
        Case(["pack", "segmentation", "--images", "pictures/cat", "--masks", "masks/cat", "made", "--size", "16x16", "--mask-orientation", "x"]),
        Case(["pack", "segmentation", "--images", "pictures/cat", "--masks", "masks/cat", "made", "--size", "16x16", "--mask-map", "x"], "from PIL import Image; [Image.fromarray(np.uint8([[0, 255]] * 2)).resize((16, 16), 0).save('masks/cat/%d.png' % n) for n in range(3)]"),
        Case(["pack", "segmentation", "--images", "pictures/cat", "--masks", "masks/cat", "made", "--size", "16x16", "--mask-map", "1=1,1=2"], "from PIL import Image; [Image.fromarray(np.uint8([[0, 255]] * 2)).resize((16, 16), 0).save('masks/cat/%d.png' % n) for n in range(3)]"),
        Case(["pack", "segmentation", "--images", "pictures/cat", "--masks", "masks/cat", "made", "--size", "16x16"], "import os; [os.rename('masks/cat/%d.png' % n, 'masks/cat/%d_L.png' % n) for n in range(3)]"),
        Case(["pack", "segmentation", "--images", "pictures/cat", "--masks", "masks/cat", "made", "--size", "16x16"], "import os; [os.remove('masks/cat/%d.png' % n) for n in range(3)]"),
        Case(["pack", "segmentation", "--images", "pictures/cat", "--masks", "masks/cat", "made", "--size", "16x16"], "from PIL import Image; [Image.fromarray(np.uint8([[0, 128, 255]])).resize((16, 16), 0).save('masks/cat/%d.png' % n) for n in range(3)]"),
        Case(["pack", "segmentation", "--images", "pictures/cat", "--masks", "masks/cat", "made", "--size", "16x16"], "from PIL import Image; [Image.new('RGB', (16, 16), (n, 9, 8)).save('masks/cat/%d.png' % n) for n in (3, 3, 3)]; import os; [os.replace('masks/cat/3.png', 'masks/cat/0.png')]; [Image.new('RGB', (16, 16), (3, 9, 8)).save('masks/cat/%d.png' % n) for n in range(3)]"),
        Case(["pack", "segmentation", "--images", "pictures/cat", "--masks", "masks/cat", "made", "--size", "16x16"], "from PIL import Image; [(Image.open('masks/cat/%d.png' % n).save('masks/cat/%d.jpg' % n), Path('masks/cat/%d.png' % n).unlink()) for n in range(3)]"),
        Case(["pack", "segmentation", "--images", "pictures/cat", "--masks", "masks/cat", "made", "--size", "16x16"], "from PIL import Image; [Image.fromarray(np.full((16, 16), 700, 'u2')).save('masks/cat/%d.png' % n) for n in range(3)]"),
        Case(["pack", "segmentation", "--images", "pictures/cat", "--masks", "masks/cat", "made", "--size", "16x16", "--mask-map", "2=1"]),
        Case(["pack", "segmentation", "--images", "pictures/cat", "--masks", "masks/cat", "made", "--size", "16x16"], "from PIL import Image; made = [Image.fromarray(np.uint8([[0, 1]] * 2), 'P').resize((16, 16), 0) for n in range(3)]; [(mask.putpalette([n, 0, 0, 9, 9, 9]), mask.save('masks/cat/%d.png' % n)) for n, mask in enumerate(made)]"),
        Case(["pack", "segmentation", "--images", "pictures/cat", "--masks", "masks/cat", "made", "--size", "16x16", "--mask-colors", "few.txt"], "open('few.txt', 'w').write('x')"),
        Case(["pack", "segmentation", "--images", "pictures/cat", "--masks", "masks/cat", "made", "--size", "16x16"], "from PIL import Image; e = Image.Exif(); e[0x0112] = 3; [Image.new('RGB', (16, 16)).save('pictures/cat/%d.png' % n, exif=e) for n in range(3)]"),
        Case(["pack", "segmentation", "--images", "empty", "--masks", "masks", "made", "--size", "8x8"]),
        Case(["pack", "massspec", "--msp", "library.msp", "made", "--max-mz", "0"]),
        Case(["pack", "massspec", "--msp", "library.msp", "made", "--structures", "mol"], then="MOL"),
        Case(["pack", "massspec", "--msp", "library.msp", "made", "--mol-dir", "none/none"]),
        Case(["pack", "massspec", "--msp", "bad.msp.gz", "made"]),
        Case(["pack", "massspec", "--msp", "wide.msp", "made"]),
        Case(["pack", "massspec", "--msp", "mixed.msp", "made"],
             "from molecule_makers import msp_record; open('mixed.msp', 'w').write(''.join(msp_record('c', SMILES='CCO', **more) for more in ({}, {'PrecursorMZ': '47'})))"),
        Case(["pack", "massspec", "--msp", "empty", "made"]),
        Case(["pack", "massspec", "--msp", "bad.mzML", "made"], "open('bad.mzML', 'w').write('<?xml version=\"1.0\"?><mzML><run>')"),
        Case(["pack", "massspec", "--msp", "library.msp", "made", "--mol-dir", "bad.zip"],
             "import zipfile; z = zipfile.ZipFile('bad.zip', 'w', zipfile.ZIP_BZIP2); z.writestr('a.mol', 'x'); z.close()"),
        Case(["pack", "arrays", "_a.npy", "made"], "import os; os.rename('a.npy', '_a.npy')"),
        Case(["pack", "bars", "bars/EURUSD_M5.csv", "made", "--windows", "H1=8"]),
        Case(["pack", "bars", "empty", "made", "--windows", "H1=8"]),
        Case(["pack", "massspec", "--msp", "library.msp", "made", "--mol-dir", "table.csv"]),
        Case(["pack", "massspec", "--msp", "long.msp", "made"], "open('long.msp', 'w').write('Name: ' + 'x' * (17 << 20))"),
        *_tables(),
        Case([*BARS[:-2], "--windows", "M5=8,H1=4", "--columns", "x"], then="header"),
        Case([*BARS, "--stamp", "x"]),
        Case([*BARS, "--decimal", "x"]),
        Case([*BARS, "--drop", "x"]),
        Case(["pack", "bars", "bars/EURUSD_M5.csv", "made", "--windows", "M5=8"],
             "p = Path('bars/EURUSD_M5.csv'); p.write_text(p.read_text().replace('time,open,high,low,close', 'Zeit,Erster,Hoch,Tief,Schluss', 1))",
             fill={"open=NAME,high=NAME,low=NAME,close=NAME": "open=Erster,high=Hoch,low=Tief,close=Schluss"}),
        Case(["pack", "bars", "q_D1.csv", "made", "--windows", "D1=4", "--horizon", "1"],
             "open('q_D1.csv', 'w').write(''.join(f'\"{2000 + n // 28 // 12}-{n // 28 % 12 + 1:02d}-{n % 28 + 1:02d}\",\"110,250\",\"110,500\",\"110,125\",\"110,375\"' + chr(10) for n in range(60)))"),
        Case(["pack", "bars", "bars", "made", "--windows", "M5=8", "--split-at", "2020-09-10,2020-09-20", "--horizon", "2"],
             "p = Path('bars/EURUSD_M5.csv'); t = p.read_text(); Path('bars/GBPUSD_M5.csv').write_text(t[:-3] + 'x' + chr(10))"),
    ],
    "train": [Case(["predict", "run/best.pt", "store", "x.xls"], at="x.xls")],
    "recipes": [
        Case(["train", "--config", "config.yaml", "--store", "store", *ON_CPU]),
        Case(["train", "--set", "recipe.name=tabular", *ON_CPU]),
        Case([*TRAIN, "--set", "recipe.options.hidden=x"]),
        Case([*TRAIN, "--set", "recipe.options.dropout=2"]),
        Case([*TRAIN, "--set", "recipe.options.hiden=[8]"]),
        Case(["train", "--config", "configs/massspec.yaml", "--set", "recipe.options.teacher=1", *ON_CPU], then="stores"),
        Case([*TRAIN, "--set", "training.output_bound=3", "--set", "recipe.options.output_bound=4"]),
        Case([*TRAIN, "--store", "plain-store"]),
        Case([*TRAIN, "--set", "recipe.options.field=x"]),
        Case([*TRAIN, "--set", "recipe.options.split=x"]),
        Case([*TRAIN, "--set", "recipe.options.ratios=[0.0, 0.5, 0.5]"]),
        Case([*TRAIN, "--store", "window-store", "--set", "recipe.options.patch=900"]),
        Case([*TRAIN, "--run-dir", "run"]),
        Case([*TRAIN, "--gpus", "3"]),
        Case(["export", "run", "out.onnx"], at="run"),
        Case(["export", "short/best.pt", "out.onnx"], "import shutil; Path('short').mkdir(); shutil.copy('run/best.pt', 'short/step-000000004.pt')", at="short/best.pt"),
        Case(["export", "x.onnx", "out.onnx"], "open('x.onnx', 'w').write('')"),
        Case(["export", "run/best.pt", "out.x"], at="out.x"),
        Case(["export", "run/best.pt", "out.onnx", "--size", "8x8"]),
        Case(["export", "run/best.pt", "out.onnx", "--batch", "0"]),
        Case(["export", "run/best.pt", "out.onnx", "--opset", "3"]),
        Case(["predict", "run/best.pt", "store", "x.parquet", "--split", "x"]),
        Case(["predict", "run/best.pt", "none.csv", "x.parquet"]),
        Case(["predict", "run/best.pt", "other", "x.parquet", "--split", "val"],
             "f = class_table(40, 3); write_store(Path('other'), [f])"),
        Case(["predict", "none/x.safetensors", "store", "x.parquet"]),
        Case(["predict", "run/best.pt", "repaired", "x.csv"], "v = np.random.default_rng(0).normal(size=(40, 7)).astype('f4'); np.save('features.npy', v); import subprocess, sys; "
             "from stoker.packing import pack, PackOptions; from stoker.sources.arrays import ArraysSource; pack(ArraysSource((Path('features.npy'),)), 'repaired', PackOptions(jobs=1, repairs=('robust',)))",
             fill={"OUT.csv": "y.csv"}, then="which does not read"),
        Case(["predict", "x.safetensors", "store", "x.parquet"], "open('x.safetensors', 'wb').write(b'x' * 99)"),
        Case(["export", "run/best.pt", "q.pt", "--int8", "--split", "x"]),
        Case(["export", "run/best.pt", "q.pt", "--int8", "--batch", "0"]),
        Case(["train", "--set", "recipe.name=segmentation", "--store", "store", *ON_CPU], fill={"IMAGES": "pictures/cat", "MASKS": "masks/cat"}),
        Case(["train", "--set", "recipe.name=segmentation", "--store", "seg-store", "--set", "recipe.options.num_classes=2", *ON_CPU]),
        Case(["train", "--set", "recipe.name=images", "--store", "seg-store", *ON_CPU], fill={"FOLDER": "pictures", "OUT": "packed"}),
        Case(["train", "--set", "recipe.name=segmentation", "--store", "seg-store", "--set", "recipe.options.ratios=[0.0,0.5,0.5]", *ON_CPU]),
        Case(["train", "--set", "recipe.name=forex", "--store", "store", *ON_CPU], fill=TWO),
        Case(["train", "--set", "recipe.name=massspec", "--store", "store", *ON_CPU]),
        Case(["train", "--set", "recipe.name=forex", "--store", "forex-store", "--set", 'recipe.options.timeframes=["W1"]', *ON_CPU]),
        Case([*MINE, "recipe.name=mine_1:Autoencoder"], OWN + "own('mine_1', '(\"train\", \"val\", \"test\")', '(\"val\",)')"),
        Case([*MINE, "recipe.name=mine_2:Autoencodr"], OWN + "own('mine_2')"),
        Case([*MINE, "recipe.name=mine_3:Autoencoder"], OWN + "own('mine_3', folder='code')", fill={"FOLDER": "code"}),
        Case([*MINE, "recipe.name=mine_4:Autoencoder"], OWN + "own('mine_4', 'import torch', 'import no_such_package')"),
        Case([*MINE, "recipe.name=mine_5:Autoencoder"], OWN + "own('mine_5', 'from data', '1 / 0; from data')", then="ZeroDivisionError"),
        Case([*MINE, "recipe.name=mine_6:Autoencoder"], OWN + "own('mine_6', 'options.field]', 'options.feeld]')", then="AttributeError"),
        Case(["train", "--config", "configs/massspec.yaml", "--mol-dir", "mols"]),
        Case([*TRAIN, "--set", "recipe.name=tabula"]),
        Case([*FOREX, "forex-store", "--set", "recipe.options.head_weights=document"]),
        Case([*FOREX, "part", "--set", "recipe.options.label_gaps=drop"], PART % "['label_gap']"),
        Case([*FOREX, "part"], PART % "['split', 'time', 'label_time']", fill=TWO),
        Case([*FOREX, "forex-store", "--set", "recipe.options.stateful=true", "--set", "training.batch_size=4", "--set", "data.memory_efficient_mode.ram_32gb_mode.max_training_samples=3"]),
        Case([*TRAIN, "--store", "nan"], "f = class_table(300); f['features'].values[3, 1] = np.nan; write_store(Path('nan'), [f]).close()",
             fill={"arrays FILE OUT": "table dirty.csv made"}),
        Case(["predict", "x.safetensors", "store", "x.parquet"], "from safetensors.torch import save_file; save_file({'a': torch.zeros(2)}, 'x.safetensors')"),
        Case(["export", "run/best.pt", "q.pt", "--int8", "--store", "other", "--split", "test"],
             "f = class_table(40); f['split'] = Dense(np.arange(40) % 2); write_store(Path('other'), [f]).close()"),
        Case(["train", "--set", "recipe.name=segmentation", "--store", "seg-store", *ON_CPU, "--set", f"recipe.options.ignore_values={[*range(255)]}"]),
        Case([*TRAIN, "--store", "series", "--set", "recipe.options.patch=3", "--set", "recipe.options.stride=1", "--set", "recipe.options.split=distinct"], "from run_makers import make_store; make_store('series', Path('series')).close()"),
        Case([*TRAIN, "--store", "real", "--set", "recipe.options.task=classification"],
             "write_store(Path('real'), [{**class_table(300), 'targets': Dense(np.linspace(0, 1, 300).astype('f4'))}]).close()"),
        Case([*TRAIN, "--store", "many", "--set", "recipe.options.task=classification"],
             "write_store(Path('many'), [{**class_table(12_000), 'targets': Dense(np.arange(12_000))}]).close()"),
        Case([*TRAIN, "--store", "aside.h5", "--set", "recipe.options.target_field=y"],
             "import h5py; h = h5py.File('aside.h5', 'w'); h['features'] = np.eye(40, 3, dtype='f4'); h['y'] = np.array([b'a'] * 40); h['targets'] = np.arange(40) % 2; h.close()",
             fill={"ANOTHER": "targets"}),
    ],
    "compat": [
        Case(["bench", "memory", "--msp", "library.msp", "--mode", "x"]),
        Case(["bench", "memory", "--msp", "library.msp", "--samples", "0"]),
        Case(["config", "migrate", "config.yaml", "new.yaml", "--recipe", "tabula"]),
        Case(["bench", "memory", "--msp", "bare.msp"], "open('bare.msp', 'w').write('Name: a' + chr(10) + 'Num Peaks: 1' + chr(10) + '1 2' + chr(10))",
             fill={"FOLDER": "mols"}, then="no sample is left"),
    ],
    "store": [
        Case(["verify", "none/none"]),
        Case(["verify", "empty"]),
        Case(["verify", "none/none.h5"]),
        Case(["verify", "text.h5"]),
        Case(["train", "--config", "tabular", "--store", "table.csv", *ON_CPU]),
        Case(["pack", "table", "table.csv", "made", "--repair", "x"]),
        Case(["pack", "table", "table.csv", "made", "--repair", "clip:x"]),
        Case(["pack", "table", "prices.csv", "made", "--repair", "min-denominator:x"],
             "open('prices.csv', 'w').write('ratio,close,vwap' + (chr(10) + '1,2,3') * 30)"),
        Case(["pack", "table", "gone.csv", "made", "--repair", "fill:median"], "open('gone.csv', 'w').write('a,b' + (chr(10) + '1,inf') * 30)"),
    ],
    "runs": [
        Case(["report", "none/none"]),
        Case(["report", "empty"]),
        Case(["monitor", "table.csv", "--once"]),
        Case(["report", "told", "--png", "table.csv"]),
    ],
    "monitor.py": [
        Case(["monitor", "--once", "--csv", "table.csv"]),
        Case(["monitor", "--once", "--csv", "none/x.csv"]),
    ],
    "doctor": [
        Case(["doctor", "--", "train.py"], "open('train.py', 'w').write('')"),
        Case(["doctor", "compare", "none.json", "none.json"], "open('train.py', 'w').write('')"),
        Case(["doctor", "compare", "table.csv", "table.csv"], "open('train.py', 'w').write('')"),
        Case(
            ["doctor", "compare", "seen.json", "seen.json"],
            "open('train.py', 'w').write('')\n"
            "open('seen.json', 'w').write('{\"findings\": [], \"measurements\": {\"subject\": \"a\"}}')",
        ),
    ],
    "demo": [Case(["demo", "--folder", "table.csv"])],
    "errors.py": [
        Case(["config", "migrate", "bars", "new.yaml"]),
        Case(["pack", "table", "none/none.csv", "made"]),
        Case(["pack", "table", "empty", "made"]),
    ],
    "ownership.py": [
        Case(["export", "run/best.pt", "./run/best.pt", "--int8"], at="./run/best.pt"),
        Case(["export", "run/best.pt", "pipe.safetensors"], "import os; os.mkfifo('pipe.safetensors')", at="pipe.safetensors"),
        Case(["export", "run/best.pt", "out.onnx"], "open('out.onnx', 'w').write('x')", at="out.onnx"),
        Case(["export", "run/best.pt", "out.onnx"], "Path('out.onnx').mkdir()", at="out.onnx"),
    ],
    "units.py": [
        Case(["plan", "store", "--gpu-memory", "16"]),
        Case(["plan", "store", "--gpu-memory", "x"], at="x"),
        Case(["plan", "store", "--gpu-memory", "16GB", "--share", "200%"], at="200%"),
    ],
    "tune": [
        Case(["tune", "--config", "tabular.yaml", "--seconds-per-try", "0", *ON_CPU]),
    ],
    "config": [
        *_wrong_values(),
        Case([*CHECK, "training.batch_sizes=3"]),
        Case([*CHECK, "use_amp=true"]),
        Case([*CHECK, "trainng.lr=0.1"]),
        Case([*CHECK, "training.lr.x=1"]),
        Case([*CHECK, "data.num_workers=4-6"]),
        Case([*CHECK, "data.batch_size=2020-01-01"], then="text"),
        Case([*CHECK, "data.batch_size=010"]),
        Case([*CHECK, "training.lr=1", "--set", "training.lr=2"]),
        Case([*CHECK, "data.prefetch_factor=2"]),
        Case([*CHECK, "training.lr=1", "--set", "training.learning_rate=2"]),
        Case([*CHECK, "data.drop_last=true", "--set", "training.batch_size=64", "--set", "data.memory_efficient_mode.ram_32gb_mode.max_training_samples=2"]),
        Case([*CHECK, "training.use_amp=false", "--set", "training.precision=bf16"]),
        Case([*CHECK, "training.batch_size=64", "--set", "training.max_training_samples=2"]),
        Case(["config", "check", "latin.yaml"], "open('latin.yaml', 'wb').write(b'# \\xff' + bytes([10]))"),
        Case(["config", "check", "tab.yaml"], "open('tab.yaml', 'w').write('training:' + chr(10) + chr(9) + 'lr: 1')"),
        Case(["config", "check", "none/none.yaml"]),
        Case(["config", "migrate", "config.yaml", "new.yaml", "--recipe", "tabula"]),
        Case([*TRAIN, "--set", "training"]),
        Case([*TRAIN, "--set", "data=3"]),
    ],
}  # fmt: skip
