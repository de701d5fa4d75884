"""Ten million damaged inputs through every parser: nothing may crash, hang, or be taken for other data.

    python benchmarks/proof/fuzz.py [--inputs 10000000] [--seconds 3600] [--jobs 2] [--only msp,csv] [--seed 0]
    python benchmarks/proof/fuzz.py --repeat csv:1234     runs one input alone, with its traceback

Enters: nothing; every input is made from its family and number. Leaves: the counts per family in
`benchmarks/results/proof_fuzz-*.json`, from which the next run goes on. Costs: 0.1 to 3 ms an input.

`refused` is a `StokerError`, with its sentence; `right` is taken, and held against what is known of the input: two
engines agree (MSP), the intact records come out as they are (MGF), the cells are those that were written (CSV), the
arrays and tensors are the undamaged ones (stores, checkpoints), what was accepted is accepted again and is the same
(YAML), the pixels have the size that was promised (JPEG), files of the user's with the names of stoker's own are all
there afterwards, byte for byte. Anything else that is raised counts as `wrong`.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from campaign import Campaign, Family, make_parser
from stoker.config.load import dump_config, parse_config
from stoker.errors import RefusalList, StokerError
from stoker.train.checkpoint_file import read_file, write_file

# Generators of inputs lie with the tests, and parsers that need pyarrow or Pillow are imported by their own families: a
# machine without them runs the others.
Trial = Callable[[random.Random], str]
SPLINTERS = [
    *(bytes([value]) for value in b"\x00\xff\n\r\t\"',;=:-{[#%|"),
    b"\xef\xbb\xbf", b"nan", b"1e999", b"9" * 40, b"\xe2\x80\xa8", b"&a", b"*a", b"!!python/object:os.system",
]  # fmt: skip


def damaged(rng: random.Random, data: bytes, low: int = 0, high: int | None = None) -> bytes:
    """Return data with one to eight changes between two places."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        end = min(len(raw), len(raw) if high is None else high)
        if end <= low:
            break
        at, kind = rng.randrange(low, end), rng.randrange(7)
        if kind == 0:
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            raw[at] = rng.choice((0, 0xFF, 0x7F, 0x80, rng.randrange(256)))
        elif kind == 2:
            del raw[at : at + rng.choice((1, 1, 2, 7, 40))]
        elif kind == 3:
            raw[at:at] = raw[at : at + rng.choice((1, 3, 20))] * rng.randint(1, 3)
        elif kind == 4:
            raw[at:at] = rng.choice(SPLINTERS)
        elif kind == 5:
            other = rng.randrange(low, end)
            raw[at : at + 16] = raw[other : other + rng.randrange(24)]
        elif rng.random() < 0.3:
            del raw[at:]
    return bytes(raw)


# Records of an input. Most are small: a record more takes its time in both engines, and is damaged no more than one.
SIZES = (1, 1, 1, 2, 4)


# -- spectra -----------------------------------------------------------------------------------------


def prepare_msp(scratch: Path) -> Trial:
    import test_fuzz_msp as msp_inputs

    path = scratch / "x.msp"

    def trial(rng: random.Random) -> str:
        data = msp_inputs.make_input(rng, SIZES)
        path.write_bytes(data)
        fast, error = msp_inputs.outcome(path, "fast")
        careful, same = msp_inputs.outcome(path, "careful")
        assert error == same, (error, same)
        msp_inputs.assert_equal(fast, careful, data)
        if error is not None:
            return "refused"
        for batch in fast:
            msp_inputs.check_invariants(batch)
        msp_inputs.check_lines(data, fast)
        return "right"

    return trial


MGF = b"""BEGIN IONS
TITLE=%d
PEPMASS=285.0208 1000
CHARGE=1+
RTINSECONDS=63.5
IONMODE=positive
SMILES=CCO
60.5 12
%d.25 7.5 1+
91.0\t100

END IONS

"""


def prepare_mgf(scratch: Path) -> Trial:
    from test_fuzz_msp import check_invariants

    from stoker.sources.massspec.formats import as_msp
    from stoker.sources.msp import read_msp

    path, work = scratch / "x.mgf", scratch / "work"
    work.mkdir()

    def trial(rng: random.Random) -> str:
        numbers = [rng.randrange(61, 90) for _ in range(1 + rng.choice(SIZES))]
        first, *others = [MGF % (number, number) for number in numbers]
        path.write_bytes(first + damaged(rng, b"".join(others)))
        try:
            made = as_msp(path, work)
            spectra = list(read_msp(made.path))
        except StokerError:
            return "refused"
        finally:
            for each in work.iterdir():
                each.unlink()
        for batch in spectra:
            check_invariants(batch)
        batch = spectra[0]
        begin, end = batch.offsets[:2]
        assert batch.mz[begin:end].tolist() == [60.5, numbers[0] + 0.25, 91.0], batch.mz[begin:end]
        assert batch.intensity[begin:end].tolist() == [12, 7.5, 100]
        return "right"

    return trial


# -- tables ------------------------------------------------------------------------------------------


def prepare_csv(scratch: Path) -> Trial:
    from stoker.sources.tables.layout import TextOptions
    from stoker.sources.tables.reading import batches, open_table

    path = scratch / "x.csv"

    def written(rng: random.Random) -> tuple[list[list[str]], bytes]:
        width, height = rng.randint(2, 6), rng.choice((2, 3, 4, 5, 12))
        sep, decimal = rng.choice(
            ((",", "."), (";", "."), (";", ","), ("\t", "."), ("\t", ","), ("|", "."))
        )
        rows = [
            [
                f"{rng.uniform(-99, 99):.{rng.randint(1, 4)}f}".replace(".", decimal)
                for _ in range(width)
            ]
            for _ in range(height)
        ]
        if rng.random() < 0.5:
            for number, row in enumerate(rows):
                row[0] = f"word{number % 3} x"
        names = [f"col_{number}" for number in range(width)]
        quote = rng.choice(("", '"'))
        end = rng.choice(("\n", "\r\n"))
        text = (
            end.join(sep.join(f"{quote}{cell}{quote}" for cell in row) for row in [names, *rows])
            + end
        )
        return [names, *rows], text.encode(rng.choice(("utf-8", "utf-8-sig", "utf-16", "latin-1")))

    def trial(rng: random.Random) -> str:
        rows, data = written(rng)
        is_damaged = rng.random() < 0.7
        path.write_bytes(damaged(rng, data) if is_damaged else data)
        refused = RefusalList()
        try:
            file = open_table(path, TextOptions())
            found = [batch.to_pydict() for batch in batches(file, refused)]
        except StokerError:
            assert is_damaged, "an intact table is refused"
            return "refused"
        if not is_damaged:
            assert list(file.names) == rows[0], (file.names, rows[0])
            cells = [list(row) for part in found for row in zip(*part.values(), strict=True)]
            assert [[str(cell).strip() for cell in row] for row in cells] == rows[1:], cells[:2]
        return "right"

    return trial


# -- stores and checkpoints --------------------------------------------------------------------------


def prepare_store(scratch: Path) -> Trial:
    from test_fuzz_store import mutate, read_everything

    from store_makers import simple_shard, write_store

    base, work = scratch / "base", scratch / "s"
    rng = np.random.default_rng(0)
    write_store(base, [simple_shard(rng, 6), simple_shard(rng, 4)]).close()
    truth = read_everything(base)
    files = {file.name: file.read_bytes() for file in sorted(base.iterdir())}
    hot = {name: [0, 96, 512, 2048, max(0, len(data) - 4096)] for name, data in files.items()}
    work.mkdir()
    for name, data in files.items():
        (work / name).write_bytes(data)

    def trial(rng: random.Random) -> str:
        name = rng.choice(sorted(files))
        if name.endswith(".json"):
            data = damaged(rng, files[name])
        else:
            data = mutate(files[name], np.random.default_rng(rng.getrandbits(64)), hot[name])
        (work / name).write_bytes(data)
        try:
            found = read_everything(work)
        except StokerError:
            return "refused"
        finally:
            (work / name).write_bytes(files[name])
        assert found == truth, "other data"
        return "right"

    return trial


def prepare_checkpoint(scratch: Path) -> Trial:
    path = scratch / "step-0000000001.pt"
    state = {
        "w": torch.arange(40.0),
        "n": {"step": 3, "name": "x", "list": [1, 2.5, None]},
        "i": torch.arange(3),
    }
    described = {
        "number": 1,
        "step": 1,
        "epoch": 0,
        "metrics": {"loss": 0.5},
        "saved_at": 0.0,
        "run_id": "r",
    }
    write_file(path, state, described)
    data = path.read_bytes()
    end = data.rfind(b"PK\x05\x06")

    def trial(rng: random.Random) -> str:
        changed = damaged(rng, data, *rng.choice(((0, None), (end, None), (0, 64))))
        path.write_bytes(changed)
        try:
            _, found = read_file(path, "cpu")
        except StokerError:
            return "refused"
        for name in "wi":
            assert torch.equal(found[name], state[name]), "another tensor"
        assert found["n"] == state["n"]
        return "right"

    return trial


# -- configs -----------------------------------------------------------------------------------------

YAML = [
    b"recipe: {name: tabular, store: s, options: {hidden: [16, 8]}}\ntraining: {epochs: 6, batch_size: 16}\n",
    b"recipe:\n  name: forex\n  store: bars\ntraining:\n  epochs: 3\n  precision: bf16\nrun: {dir: run}\n",
    b"training:\n  lr: 1e-3\n  batch_size: 128 # a comment\n  clip_norm: 0.5\n  seed: 7\n",
]


def prepare_yaml(scratch: Path) -> Trial:  # noqa: ARG001
    def trial(rng: random.Random) -> str:
        text = damaged(rng, rng.choice(YAML)).decode("utf-8", "replace")
        try:
            config = parse_config(text)
        except StokerError:
            return "refused"
        assert parse_config(dump_config(config)) == config, (
            "what is written again is another config"
        )
        return "right"

    return trial


# -- pictures ----------------------------------------------------------------------------------------


def prepare_jpeg(scratch: Path) -> Trial:
    from PIL import Image

    from stoker.sources.images.encoded import KeepEncoded, decode_bytes, read_encoded

    path, keep = scratch / "x.jpg", KeepEncoded()
    seeds = []
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 256, (2, 2, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).resize((16 + number, 17), Image.Resampling.BICUBIC)
        options = [{}, {"subsampling": 0}, {"progressive": True}, {"restart_marker_rows": 1}][
            number % 4
        ]
        file, exif = io.BytesIO(), Image.Exif()
        exif[0x0112] = 1 + number
        (image.convert("L") if number == 5 else image).save(
            file, "JPEG", quality=70, exif=exif, **options
        )
        data = file.getvalue()
        seeds.append((data, data.rfind(b"\xff\xda") + 14))

    def trial(rng: random.Random) -> str:
        data, header = rng.choice(seeds)
        path.write_bytes(damaged(rng, data, 0, header))
        try:
            kept, _ = read_encoded(path, 3, keep, first_frame=False)
            pixels = decode_bytes(kept.data, 3)
        except StokerError:
            return "refused"
        size = kept.size if kept.orientation < 5 else kept.size[::-1]
        assert pixels.shape == (3, *size) or pixels.shape == (3, *kept.size), (
            pixels.shape,
            kept.size,
        )
        return "right"

    return trial


# -- files of the user's -----------------------------------------------------------------------------

NAMES = (
    "store.json", "remote.json", "lock", "run.jsonl", "best.pt", "step-000000001.pt", "shard-00000.h5", "thesis.tex",
    "stoker.json", ".stoker", "data", "data.partial", "cache", "a", "b",
)  # fmt: skip


def prepare_owners(scratch: Path) -> Trial:
    """Trees of a user's files with the names that stoker uses itself; whatever stoker does there, all of them stay.

    Not so the files that a true mark in their folder names, when a store is packed there: that is a damaged store.
    """
    from stoker.packing import PackOptions, pack
    from stoker.sources.arrays import ArraysSource
    from stoker.store.reader import open_store
    from stoker.train.checkpoint import Checkpoints

    np.save(scratch / "x.npy", np.arange(12, dtype="f4"))
    pack(ArraysSource((scratch / "x.npy",)), scratch / "good", PackOptions(jobs=1))
    contents = [
        b"{}",
        b"[]",
        b"",
        b"mine",
        *(path.read_bytes() for path in (scratch / "good").iterdir() if path.is_file()),
    ]
    mark = (scratch / "good" / ".stoker").read_bytes()
    marked = json.loads(mark)["files"]
    root = scratch / "home"
    os.environ["STOKER_CACHE"] = str(root / "cache")

    def trial(rng: random.Random) -> str:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        folders, mine = [root], {}
        for _ in range(rng.randint(3, 14)):
            place = rng.choice(folders) / rng.choice(NAMES)
            if place.exists():
                continue
            if rng.random() < 0.45:
                place.mkdir()
                folders.append(place)
            else:
                mine[place] = rng.choice(contents)
                place.write_bytes(mine[place])
        word, packed = "right", set()
        for _ in range(rng.randint(1, 3)):
            place = rng.choice([*folders, *(folder / rng.choice(NAMES) for folder in folders)])
            try:
                kind = rng.randrange(4)
                if kind < 2:
                    pack(ArraysSource((scratch / "x.npy",)), place, PackOptions(jobs=1))
                    packed.add(place)
                elif kind == 2:
                    with open_store(place) as store:
                        store.verify()
                else:
                    Checkpoints(place).save({"v": 1}, rng.randint(1, 3), 0, {"loss": 1.0})
            except StokerError:
                word = "refused"
        for place, content in mine.items():
            is_store = place.parent in packed and mine.get(place.with_name(".stoker")) == mark
            if is_store and place.name in marked:
                continue
            assert place.is_file(), f"{place.relative_to(root)} is gone"
            assert place.read_bytes() == content, f"{place.relative_to(root)} was changed"
        return word

    return trial


FAMILIES = [
    Family("msp", prepare_msp, 2),
    Family("mgf", prepare_mgf, 1),
    Family("csv", prepare_csv, 2),
    Family("stores", prepare_store, 1),
    Family("checkpoints", prepare_checkpoint, 3),
    Family("yaml", prepare_yaml, 1),
    Family("jpeg headers", prepare_jpeg, 4),
    Family("files of the user's", prepare_owners, 0.02, 100),
]


def main() -> None:
    parser = make_parser(__doc__, "inputs", 10_000_000)
    parser.add_argument("--only", default="", help="families, separated by commas")
    parser.add_argument("--repeat", default="", help="FAMILY:NUMBER")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    families = [
        each for each in FAMILIES if not options.only or each.name in options.only.split(",")
    ]
    if options.repeat:
        name, number = options.repeat.rsplit(":", 1)
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            (family,) = (each for each in FAMILIES if each.name == name)
            print(family.prepare(Path(folder))(random.Random(f"{options.seed} {name} {number}")))
        return
    Campaign("fuzz", families, options.inputs, options.seed, 30, options.out).run(
        options.seconds, options.jobs
    )


if __name__ == "__main__":
    main()
