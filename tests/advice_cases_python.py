# ruff: noqa: E501, RUF005  a table: one case or advice a line
"""Python that is refused, by the part of the package that refuses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from advice_cases_commands import OWN
from advice_typing import Case


def namespace() -> dict[str, Any]:
    """Return the names that every piece of Python begins with."""
    import numpy as np
    import torch

    import stoker
    from stoker.loader.loader import Loader
    from stoker.store.fields import Dense
    from store_makers import write_store
    from test_recipe_tabular import class_table

    return {
        "np": np, "torch": torch, "stoker": stoker, "Loader": Loader, "Path": Path, "Dense": Dense,
        "write_store": write_store, "class_table": class_table,
    }  # fmt: skip


IMAGES = "from stoker import GPUAugmentation, MinimalGPUAugmentation, StrongGPUAugmentation; from stoker.augment import *; from stoker.augment.ops import *; import stoker.augment as A; from types import SimpleNamespace; function = function_for_masks = lambda values, u: values; images = torch.zeros(2, 3, 8, 8)"
PICTURES = (
    IMAGES
    + "; compose = Compose([RandomHorizontalFlip()]); params = compose.draw(2, (8, 8), 3, images.device); other = compose.draw(2, (9, 9), 3, images.device); "
    "one, rows, epoch, batch = torch.zeros(3, 8, 8), torch.tensor([0]), 1, 2; labels, boxes = torch.tensor([0, 5]), torch.zeros(2, 12); "
)
SERIES = (
    "from stoker.loader.lanes import plan_lanes, plan_store_lanes; from stoker.loader.splits import *; "
    "from stoker.loader.order import Order, pick_mode; from stoker.plan.facts import even_chunks; from stoker.store.reader import open_store; "
    "from stoker.augment import Compose, RandomHorizontalFlip; store = open_store('forex-store'); plain = open_store('plain-store'); "
    "batch_size, world_size, num_lanes = 4, 1, 2; ends, window, breaks = np.arange(1, 40), 3, np.zeros(39, bool); "
    "loader = Loader('store', 16, 'cpu'); state = loader.state_dict(); odd = {**state, 'epoch': 'x'}; cut = {**state, 'chunks': 'x'}; "
    "samples = np.arange(100); split = np.arange(40) % 3; order = Order(9, 3); images, labels = np.zeros((9, 3, 8, 8), 'u1'), np.arange(9)"
)
# Pictures of several sizes, one of which is cut off.
ENCODED = (
    "import io; from PIL import Image; from stoker.augment import Compose, Resize; from stoker.store.memory import memory_store; "
    "from stoker.sources.images.encoded import picture_field; files = [io.BytesIO() for _ in range(30)]; "
    "[Image.new('RGB', (8 + n, 9)).save(file, 'PNG') for n, file in enumerate(files)]; data = [file.getvalue() for file in files]; "
    "data[3] = data[3][:20]; sizes = np.array([(9, 8 + n) for n in range(30)], 'i4'); resize = Compose([Resize(8)]); "
    "fields = {'images': picture_field(data), 'image_size': Dense(sizes), 'image_orientation': Dense(np.ones(30, 'u1'))}; "
    "pictures = memory_store(fields, 'pictures'); from stoker.store.fields import Ragged; "
    "several = memory_store({**fields, 'labels': Dense(np.arange(30)), 'v': Ragged(np.arange(30), np.arange(31))}, 'several'); "
    "from stoker.plan import make_plan, store_facts; from stoker.store.reader import open_store; "
    "for_gpu = make_plan(store_facts(open_store('store')), gpu_memory_bytes=10**9, ram_bytes=10**10)"
)
# Times of decisions and labels that do not fit together, by what is wrong.
TIMES = {
    "time, label_time = np.arange(9), np.arange(3)": "split_by_time(time, label_time=label_time)",
    "time, label_time = np.arange(9), np.arange(9) + 1": "split_by_time(label_time, time)",
    "time = np.arange(9).astype('datetime64[ns]'); label_time = np.arange(9)": "split_by_time(time, label_time)",
    "time = np.array(['2020-01-01'] * 9); label_time = np.asarray(time, 'datetime64[ns]')": "split_by_time(time, label_time)",
    "time = label_time = np.arange(9, dtype='u8') + 2**63": "split_by_time(time, label_time)",
    "time = np.array(['2020'] * 9, 'datetime64[ns]'); label_time = np.array(['3000'] * 9, 'datetime64[s]')": "split_by_time(time, label_time)",
    "time, label_time = np.arange(9) + 2**60, np.arange(9) + 2.0**61": "split_by_time(time, label_time)",
    "groups = np.array([b'caf\\xe9', b'a'])": "split_by_group(groups)",
}

MEMORY = (
    "from torch.utils.data import DataLoader, TensorDataset; from stoker.loader.splits import split_randomly; x = torch.rand(9, 2); "
    "y, z = np.arange(9), np.arange(3); dataloader = DataLoader(TensorDataset(x)); "
    "split = split_randomly(9); samples = np.asarray(split); from stoker import mix; data = {'x': x, 'y': y}; shares = {'store': 1}; "
    "weights = np.arange(9) - 1.0; long = {'v': [np.zeros(100 if n % 8 == 0 else 1) for n in range(400)]}; "
    "[write_store(Path(name), [{'v': Dense(np.arange(4))}]).close() for name in ('one', 'two') if not Path(name).exists()]"
)
SAMPLES = (
    "from stoker import PackOptions; from stoker.sources.samples import as_array, collect; from torch.utils.data import DataLoader; "
    "x, y, z = np.arange(9), np.arange(9), np.arange(3); dataloader = DataLoader([1, 2]); late = [{'x': np.zeros(4 if i == 102 else 3)} for i in range(200)]"
)
GROUPED = "from stoker.store.reader import open_store; import h5py; f = h5py.File('grouped.h5', 'w'); f['train/x'] = np.arange(9); f.close()"
MIDDLE = (
    "; walk = Loader('forex-store', 8, 'cpu', order='lanes', lanes=plan_store_lanes(store, 8)); steps = iter(walk); next(steps); "
    "saved = walk.state_dict(); steps.close(); walk.close()"
)
CAPTURING = """
import stoker
model = torch.nn.Linear(7, 2); optimizer = torch.optim.AdamW(model.parameters())
batch = torch.ones(4, 7); step = lambda batch: model(batch['features'] if isinstance(batch, dict) else batch).sum()
f = class_table(40); write_store(Path('rows'), [f]).close(); numbers = loader = Loader('rows', 8, 'cpu')
far = Loader('rows', 8, 'cpu'); far.tier = 'streamed'
"""
TRAINING = """
from stoker.train.settings import TrainSettings, read_config; from stoker import Trainer; from stoker.train.checkpoint import Checkpoints, load_checkpoint
from stoker.train.accumulation import *; from stoker.train.checks import *; from stoker.train.oom import MemoryLevel; from stoker.train.step import check_loss
from stoker.train.precision import choose_precision; from stoker.train.checkpoint_file import loadable; from stoker.train.foreign_position import ForeignPosition
from stoker.train.diagnosis import explain_samples; from stoker.train.quantize import quantize_dynamic; from torch.utils.data import DataLoader
from stoker.config import load_config, resolve
model, dataset = torch.nn.Linear(3, 2), torch.arange(8); parameters = [*model.parameters()]; optimizer = torch.optim.AdamW(parameters)
other, slow = torch.optim.AdamW([torch.zeros(2)]), torch.optim.LBFGS(parameters)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer); epochs = batches_per_epoch = 3; settings = resolve(load_config('config.yaml'))
accumulation = window = Accumulation(4); window.add(4); loss = torch.ones(3)
pairs, criterion = [(torch.ones(4, 3), torch.ones(4, 2))] * 5, torch.nn.functional.mse_loss
choose = lambda precision: choose_precision(precision, torch.device('cpu'), model)
class Reads(torch.nn.Module):
    def __init__(self):
        super().__init__(); self.inner, self.outer = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)
    forward = lambda self, rows: self.outer(rows @ self.inner.weight.T)
reads = Reads()
pass"""
ADAPTED = "from stoker.frameworks.adapted import AdaptedLoader, check_share; loader = AdaptedLoader(Loader('store', 8, 'cpu')); epoch = 1"
SPECTRA = """
from stoker.compat.massspec import LazyMassSpecDataset, NISTDataLoader
from molecule_makers import SMILES, write_library
msp_file, mol_files_dir = Path('spectra/library.msp'), Path('spectra/mols')
if not msp_file.exists():
    Path('spectra').mkdir(); write_library(Path('spectra'), SMILES[:4])
bare = Path('bare.msp'); bare.write_text('Name: a' + chr(10) + 'Num Peaks: 1' + chr(10) + '1 2' + chr(10))
dataset = LazyMassSpecDataset(msp_file, mol_files_dir, cache_dir='lazy', jobs=1)
"""
COMPAT = """
from stoker.compat.basics import *; from stoker.compat.basics import DataLoader, PipelinedDataLoader, RandomSampler
from stoker.compat.chunk_loader import ChunkDataLoader; from stoker.compat.massspec import LazyMassSpecDataset, NISTDataLoader
from stoker.compat.max_batch import find_max_batch_size; from stoker.compat.quantization import quantize_dynamic
class Fails(torch.utils.data.Dataset):
    __len__ = lambda self: 4
    __getitem__ = lambda self, index: 1 / 0
class Whole(torch.nn.Linear):
    forward = lambda self, rows: super().forward(rows).detach().long()
dataset = CustomDataset(np.arange(9), np.arange(9)); loader = PipelinedDataLoader('cpu'); batch = torch.zeros(2)
model, whole = torch.nn.Linear(4, 2), Whole(4, 2); my_loss = lambda outputs: model.weight.mean()
pass"""
STORE = (
    "from stoker.store.reader import open_store; from stoker.store.fields import Ragged; from stoker.store.repairs import *; "
    "from stoker.store.quality import *; from stoker.store.table_stats import *; "
    "from stoker.store.hdf5 import open_hdf5; from stoker.store.arrays import OpenFile; import os; here = os.getcwd(); "
    "store = open_store('store'); values, lengths = np.zeros(5, 'f4'), [2, 3]; words = np.array(['1', '2']); "
    "time = np.array([1.0, 2.0]); whole = np.array([[1, 2, 3]]); table = np.zeros((5, 3), 'f4'); columns = ['a', 'b', 'c']; "
    "limits = limits_of(TableStats.scan(table[:, :2], columns[:2])); "
)
UNEVEN = (
    STORE
    + "import h5py; h = h5py.File('uneven.h5', 'w'); h['x'] = np.zeros((9, 3)); h['y'] = np.zeros(9); h['bins'] = np.zeros(4); "
    "h['deep/z'] = np.zeros(9); h.close()"
)
VIRTUAL = (
    STORE + "import h5py; h = h5py.File('virtual.h5', 'w'); v = h5py.VirtualLayout((9,), 'i8'); "
    "v[:] = h5py.VirtualSource('lost.h5', 'd', (9,)); h.create_virtual_dataset('x', v); h.close()"
)
REMOTE = "open_store(f'file://{here}/store').read_rows('features', 0, 2)"
SOURCES = (
    "from stoker.sources.msp.library import read_msp, split_msp; from stoker.sources.massspec import MassSpecSource; "
    "from stoker.sources.molecules.files import MolIndex; from stoker.sources.arrays import ArraysSource; "
    "from stoker.sources.tables import TableSource; from stoker.sources.bars.source import BarsSource; "
    "from stoker.sources.images import ImagesSource; import gzip, zipfile; path = Path('library.msp'); "
    "Path('only.msp.gz').write_bytes(gzip.compress(path.read_bytes())); "
    "Path('cut.msp.gz').write_bytes(Path('only.msp.gz').read_bytes()[:-9]); "
    "z = zipfile.ZipFile('broken.zip', 'w'); z.writestr('a.mol', 'x'); z.close(); broken = Path('broken.zip'); "
    "broken.write_bytes(broken.read_bytes().replace(b'PK' + bytes([1, 2]), b'PK00'))"
)

RECIPES = (
    "from stoker.recipes.massspec.recipe import *; from stoker.recipes.schedule import *; from stoker.recipes.options import *; "
    "from stoker.recipes.inference import *; from stoker.recipes.catalogue import restore; from stoker.recipes.export.graph import deploy; "
    "from stoker.recipes.contract import Sizes; from stoker.store.reader import open_store; from stoker.recipes.tabular.recipe import *; "
    "from dataclasses import replace; apart = write_store(Path('apart'), [{'group': Dense(np.arange(9)), 'split': Dense(np.ones(9, 'i8'))}])"
)


def _refused(setup: str, *wrong: str, **named: str) -> list[Case]:
    """Return a case for each piece of Python, with one setup."""
    return [Case(each, setup, **named) for each in wrong]


PYTHON: dict[str, list[Case]] = {
    "augment": _refused(
        IMAGES,
        "Compose([RandomHorizontalFlip()], backend='x')",
        "Compose([RandomHorizontalFlip()], ignore_index='x')",
        "Compose([RandomHorizontalFlip()])(images[0])",
        "Compose(RandomHorizontalFlip())",
        "Compose([RandomHorizontalFlip()]).batches(images, rows=torch.arange(2), batch_size=3)",
        "GaussianBlur(2)",
        "Normalize((0.5,), (0,))",
        "ToDtype(torch.int8)",
        "RandomHorizontalFlip(p=2)",
        "RandomCrop(size='x')",
        "RandomResizedCrop(size=0)",
        "GPUAugmentation(mean=(1, 2))",
        "MixUp(0, 10)",
        "MixUp(0.2, num_classes=0)",
        "MixUp(0.2, 10, stream=-1)",
        "Normalize((), ())",
        "Compose([RandomHorizontalFlip(), 3])",
        "Compose([Normalize(0.5, 0.5), RandomHorizontalFlip()])",
        "Compose([Normalize((0.5, 0.5), (0.5, 0.5))])(images)",
        "RandomCrop(32, padding=-1)",
        "RandomAffine(scale=3)",
        "RandomAffine(scale=(1.1, 0.9))",
        "RandomAffine(shear=3)",
        "make_preset('x')",
        "ProgressiveAugmentation({1: make_preset('minimal')})",
        "ProgressiveAugmentation({0: make_preset('minimal'), -1: make_preset('minimal')})",
        "ProgressiveAugmentation({0: 3})",
        "RandomCrop(4, padding=1, padding_mode='x')",
        "Compose([RandomCrop(8, padding=8, padding_mode='reflect')])(images)",
        "Function(function, phase='x')",
        "Function(3)",
        "RandAugment(num_ops=0)",
        "RandAugment(magnitude=99)",
        "RandAugment(num_magnitude_bins=0)",
        "RandAugment(num_magnitude_bins=0.5)",
        "RandAugment(num_ops=0.5)",
        "RandAugment(magnitude=0.5)",
        "TrivialAugment(num_magnitude_bins=0)",
    )
    + _refused(
        PICTURES,
        "compose.apply(images, params=3)",
        "compose.draw(0, (8, 8), 3, images.device)",
        "compose.seek(epoch=-1)",
    )
    + [
        Case("compose.draw(2, (8, 8), 3, 'x')", PICTURES, at="'x'"),
        Case("op(images)", IMAGES + "; op = RandomHorizontalFlip()", at="op(images)"),
        Case(
            "compose.apply(images, params, rows=rows)",
            PICTURES + "images = one; params = compose.draw(1, (8, 8), 3, one.device)",
        ),
        Case("compose.load_state_dict(3)", PICTURES, at="compose.load_state_dict(3)"),
        Case("compose.load_state_dict({})", PICTURES, at="compose.load_state_dict({})"),
        Case("Compose([RandomCrop(64)])(images)", PICTURES, into="RandomCrop"),
        Case("compose(images, masks)", PICTURES + "masks = np.zeros((2, 8, 8), 'u1')"),
        Case("compose(images, masks)", PICTURES + "masks = torch.zeros(2, 8, 8).to(torch.uint16)"),
        Case(
            "Compose([RandomHorizontalFlip()], ignore_index=255)(images, masks)",
            PICTURES + "masks = torch.zeros(2, 8, 8).to(torch.int8)",
            into="Compose",
        ),
        Case("compose(images, rows=rows)", PICTURES + "rows = [0, 1]"),
        Case("compose(images, rows=rows)", PICTURES + "rows = torch.tensor([0, 1]).int()"),
        Case("compose.apply(images, other)", PICTURES, at="other"),
        Case("compose.boxes(boxes, params)", PICTURES),
        Case("compose.boxes(boxes, params)", PICTURES + "boxes = torch.zeros(2, 3, 4).int()"),
        Case(
            "compose(images / 0); compose.check()",
            PICTURES,
            at="compose(images / 0); compose.check()",
        ),
        Case("MixUp(0.2, 10)(images, targets)", PICTURES + "targets = [0, 1]"),
        Case(
            "compose(images)",
            PICTURES + "compose = Compose([AlternatingFlip()]); indices = torch.arange(2)",
        ),
        Case(
            "compose(images, ids=indices)",
            PICTURES + "compose = Compose([AlternatingFlip()]); indices = [0, 1]",
            at="indices",
        ),
        Case("compose(images)", PICTURES + "images = torch.zeros(2, 32, 32, 3)", at="images"),
        Case(
            "Compose.from_torchvision(3)",
            PICTURES
            + "v2 = SimpleNamespace(Compose=list, RandomHorizontalFlip=type('RandomHorizontalFlip', (), {'p': 0.5}))",
        ),
        Case(
            "Compose.from_torchvision([3])",
            PICTURES
            + "v2 = SimpleNamespace(Compose=list, RandomHorizontalFlip=type('RandomHorizontalFlip', (), {'p': 0.5}))",
        ),
        Case(
            "Compose.from_torchvision([RandomRotation(9, expand=True)])",
            PICTURES + "\nclass RandomRotation:\n"
            "    center, fill = None, 0\n"
            "    def __init__(self, angle, expand): self.degrees, self.expand = [-angle, angle], expand\n"
            "    def __call__(self, image): return image",
        ),
        Case(
            "Compose([Function(function, phase='geometry')])(images, masks)",
            PICTURES + "masks = torch.zeros(2, 8, 8).long()",
            into="Compose",
        ),
        Case(
            "A.guard.check_loss(torch.nn.CrossEntropyLoss(), Compose([RandomRotation(9)]))",
            PICTURES + "import stoker.augment.guard",
            at="torch.nn.CrossEntropyLoss()",
        ),
        Case("MixUp(0.2, num_classes=2)(images, labels)", PICTURES, into="MixUp"),
    ]
    + _refused(
        IMAGES.replace(
            "images = torch.zeros(2, 3, 8, 8)", "images = torch.zeros(2, 3, 8, 8).requires_grad_()"
        ),
        "Compose([RandomHorizontalFlip()])(images)",
    )
    + _refused(
        IMAGES.replace("torch.zeros(2, 3, 8, 8)", "np.zeros((2, 3, 8, 8), 'f4')"),
        "Compose([RandomHorizontalFlip()])(images)",
    )
    + _refused(
        IMAGES.replace("torch.zeros(2, 3, 8, 8)", "torch.zeros(2, 3, 8, 8).int()"),
        "Compose([RandomHorizontalFlip()])(images)",
    )
    + _refused(
        IMAGES + "; masks = torch.zeros(2, 8, 8)",
        "Compose([RandomHorizontalFlip()])(images, masks)",
    ),
    "loader": _refused(
        SERIES,
        "Loader('store', batch_size=0)",
        "Loader(b'store', 64)",
        "Loader('store', 16, seed='x')",
        "Loader('store', 16, order='x')",
        "Loader('store', 16, device='x')",
        "Loader('store', 16, device='cuda:99')",
        "Loader('store', 16, fields='features')",
        "Loader('store', 16, samples=np.array([0, 1]), drop_last=True)",
        "Loader('store', 16, num_slots=0)",
        "split_randomly(10, ratios=(1, 2, 3))",
        "Loader('store', 16, fields=['x'])",
        "Loader('store', 16, augment=Compose([RandomHorizontalFlip()]))",
        "Loader('store', 16, device='meta')",
        "Loader('store', 16, plan=3)",
        "Loader('store', 16, plan=loader.plan, data_bytes=10**9)",
        "Loader('forex-store', 4, order='lanes', lanes=plan_store_lanes(store, 4), data_bytes=10**4)",
        "Loader('forex-store', batch_size, order='lanes')",
        "Loader('store', 16, seed=-1)",
        "Loader('store', 16, epochs=3)",
        "plan_lanes(ends, window, breaks, num_lanes=99)",
        "plan_lanes(ends, window, breaks, num_lanes=0)",
        "plan_lanes(ends, 0, breaks, num_lanes)",
        "plan_store_lanes(store, 2, fields=[])",
        "plan_store_lanes(store, 2, fields=['x'])",
        "loader.set_epoch(-1)",
        "Loader({'images': images}, 4, augment=[RandomHorizontalFlip()])",
        "Loader({'images': np.zeros((9, 3, 8, 8), 'u1')}, 4, augment=__import__('stoker.augment').augment.MixUp(0.2, 3))",
        "loader.load_state_dict(3)",
        "loader.load_state_dict(odd)",
        "loader.load_state_dict(cut)",
        "pick_mode(order='time', shuffle=True)",
        "pick_mode(order='shuffled', shuffle=False)",
        "pick_mode(order='x', shuffle=None)",
        "pick_mode(order=None, shuffle='no')",
        "Order(9, batch_size=0)",
        "Order(9, 3, seed=-1)",
        "Order(9, batch_size=1, world_size=2)",
        "Order(9, 3, chunks=((0, 3),))",
        "order.epoch(-1)",
    )
    + _refused(
        ENCODED,
        "Loader(pictures, 4, 'cpu', augment=resize, on_broken='x')",
        "Loader(several, 4, 'cpu', augment=resize, on_broken='skip')",
        "Loader(pictures, 4, 'cpu', augment=resize, plan=for_gpu)",
    )
    + [
        Case(
            "list(Loader(pictures, 4, 'cpu', on_broken='skip', broken_budget='90%'))",
            ENCODED,
            into="Loader",
        ),
        Case(
            "list(Loader(pictures, 4, 'cpu', augment=resize, on_broken='skip', broken_budget=0))",
            ENCODED,
            into="Loader",
        ),
        Case(
            "Loader('forex-store', 4, order='lanes', lanes=plan_store_lanes(store, num_lanes=8))",
            SERIES,
            into="plan_store_lanes",
        ),
        Case(
            "Loader('forex-store', 4, samples=samples, order='lanes', lanes=plan_store_lanes(store, 4))",
            SERIES,
        ),
        Case(
            "Loader('forex-store', batch_size=4, order='lanes', lanes=plan_store_lanes(store, 4)).load_state_dict(saved)",
            SERIES + MIDDLE,
            into="Loader",
        ),
        Case("stoker.prefetch(3, 'cpu')", SERIES + "; loader = [torch.zeros(2)]"),
        Case("stoker.prefetch('store')", SERIES, at="stoker.prefetch('store')"),
        Case("plan_store_lanes(plain, 2)", SERIES, at="plan_store_lanes(plain, 2)"),
        Case("select_samples(plain, 'train')", SERIES, at="select_samples(plain, 'train')"),
        Case(
            "select_samples('store', 'train')",
            SERIES,
            at="select_samples('store', 'train')",
            then="no field 'split'",
        ),
        Case(
            "select_samples(floats, 'train')",
            SERIES + "; floats = write_store(Path('f'), [{'split': Dense(np.zeros(9, 'f4'))}])",
            at="select_samples(floats, 'train')",
        ),
        Case("samples_of(split, 'x')", SERIES, at="'x'"),
        Case("samples_of(split + 9, 'train')", SERIES, at="samples_of(split + 9, 'train')"),
        Case(
            "split_by_group(1.5 * split)",
            SERIES + "; store = write_store(Path('g'), [{'group': Dense(np.arange(9))}])",
            at="1.5 * split",
        ),
        Case("split_randomly(-1)", SERIES, at="-1"),
        *(Case(wrong, SERIES + "; " + setup) for setup, wrong in TIMES.items()),
    ]
    + _refused(
        MEMORY,
        "Loader('store', 16, sampler=3)",
        "Loader((x, y), 4, group='x')",
        "Loader({'x': x, 'y': y}, 4, as_tuple=('X', 'y'))",
        "Loader({'x': x, 'y': y}, 4, as_tuple='x')",
        "Loader({'x': x, 'z': z}, 4)",
        "Loader(dataloader, 64)",
        "Loader(3, 64)",
        "Loader((x, y), 4, samples=split)",
        "Loader((x, y), 4, samples=samples)",
        "Loader({'x': x, 'y': y}, 4, fields=['X'])",
        "a, b = next(iter(Loader({'x': x, 'y': y}, 4, 'cpu')))",
    )
    + _refused(
        MEMORY,
        "Loader(data, 4, weights=weights)",
        "Loader(data, 4, weights=np.ones(3))",
        "Loader(data, 4, weights=np.zeros(9))",
        "Loader(data, 4, weights=np.ones(9), balance='y')",
        "Loader(data, 4, balance='Y')",
        "Loader(data, 4, balance='x')",
        "Loader(data, 4, weights=np.ones(9), order='time')",
        "Loader(data, 4, epoch_samples=-1)",
        "Loader(long, 32, 'cpu', weights=np.ones(400), data_bytes=11_000)",
        "Loader(mix(shares, per_batch=True), 16, 'cpu', chunk_bytes=2_000)",
        "mix({'store': -1})",
        "mix(['store'])",
        "Loader(mix({'one': 1, 'two': 1}), 1, samples=[0])",
    )
    + [
        Case("Loader('store', 16, sampels=None)", at="sampels=None"),
        Case("Loader('store', 16, qqq=None)"),
        Case("Loader('store', 16, samples=10)", at="10"),
        Case("Loader(x, y, 64)", MEMORY, at="Loader(x, y, 64)"),
        Case(
            "Loader([x, y], 64)",
            MEMORY + "",
            at="Loader([x, y], 64)",
        ),
        Case("Loader(loader, 64)", "loader = Loader('store', 16)", at="Loader(loader, 64)"),
        Case("Loader(['one', 'two'], 1)", MEMORY, at="['one', 'two']"),
        Case("Loader({'x': x}, 1)", "x = np.float32(3)"),
        Case("Loader(iter([1]), 16)", "dataset = [1, 2]", at="Loader(iter([1]), 16)"),
        Case(
            "batch['X']",
            MEMORY + "; batch = next(iter(Loader({'x': x}, 4, 'cpu')))",
            at="batch['X']",
        ),
    ]
    + _refused("mask = samples = np.arange(150) < 40", "Loader('store', 16, samples=mask)")
    + _refused("samples = np.array([0, 0] * 20 + [1])", "Loader('store', 1, samples=samples)")
    + _refused(
        "import os; os.environ.update(RANK='0', WORLD_SIZE='1')", "Loader('store', 16, rank=5)"
    ),
    "train": [
        Case(
            "stoker.capture(step, model=maker, optimizer=[first, second])",
            CAPTURING
            + "maker, judge = torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)\n"
            + "first, second = (torch.optim.SGD(m.parameters()) for m in (maker, judge))",
        )
    ]
    + _refused(
        CAPTURING,
        "stoker.capture(3, model=model, optimizer=optimizer)",
        "stoker.capture(step, 'x', model=model, optimizer=optimizer)",
        "stoker.capture(step, model=model, optimizer=optimizer, loader=far)",
        "stoker.capture(step, model=model, optimizer=optimizer)(next(numbers.index_batches()))",
    )
    + _refused(
        TRAINING,
        "Checkpoints('c', keep_last=0)",
        "Accumulation(nominal=0)",
        "window.add(4)",
        "load_checkpoint('none/x.pt')",
        "choose(precision='tf32')",
        "choose(precision='fp16')",
        "MemoryLevel(batch_size=0, pass_size=1)",
        "check_loss(loss)",
    )
    + [
        Case(
            "raise explain_samples([], None, choose('fp32'), 'it failed')",
            TRAINING,
            fill={"FILE": "a.npy"},
        ),
        Case(
            "raise explain_samples(bad, np.arange(8), choose('fp32'), 'it failed')",
            TRAINING
            + "; f = class_table(40); f['features'].values[3, 1] = np.nan; write_store(Path('nan'), [f]).close(); bad = Loader('nan', 8, 'cpu')",
            then="exit code 3",
        ),
        Case(
            "raise explain_samples(Loader((x, y), 8, 'cpu'), np.arange(8), choose('fp32'), 'it failed')",
            TRAINING
            + "; x, y = torch.ones(40, 3), torch.ones(40, 2); y[3] = float('nan'); features, targets = x, y",
            into="Loader",
            then="finite values only",
        ),
        Case(
            "Trainer(model, drawn, drawn, torch.nn.functional.cross_entropy, optimizer, config=dict(epochs=1), unpack=lambda batch: mix(*batch)).validate()",
            TRAINING
            + "; from stoker.augment import MixUp; model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3)); mix = MixUp(0.2, 3)"
            + "; optimizer = torch.optim.SGD(model.parameters()); drawn = [(torch.rand(4, 3, 4, 4), torch.zeros(4).long())]",
            into="Trainer",
        ),
        Case(
            "Trainer(model, dataset, None, criterion, optimizer)",
            TRAINING
            + "; dataset = torch.utils.data.TensorDataset(torch.ones(9, 3), torch.ones(9, 2))",
            at="dataset",
        ),
        Case(
            "after(None)",
            TRAINING
            + "; model = torch.nn.LazyLinear(2); train_loader = [(torch.ones(4, 3), 0)]; after = lambda _: move_model(model, 'cpu')",
            at="None",
        ),
        Case(
            "move_model(model, 'cpu')", TRAINING + "; model = torch.nn.Linear(3, 2, device='meta')"
        ),
        Case("check_parameters(model, other, 'cpu')", TRAINING, at="other"),
        Case("check_optimizer(model)", TRAINING, at="model"),
        Case(
            "check_optimizer([first, second])",
            TRAINING
            + "; import stoker; maker, judge = torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)"
            + "; first, second = (torch.optim.SGD(m.parameters()) for m in (maker, judge)); step = print",
            at="check_optimizer([first, second])",
        ),
        Case(
            "place(DataLoader(dataset, batch_size=4))",
            TRAINING
            + """
def place(loader):
    made = ForeignPosition(DataLoader(dataset, batch_size=2)); made.set_epoch(0); made.begin(); made.num_taken = 2
    return ForeignPosition(loader).load_state_dict(made.state_dict())""",
            into="DataLoader",
        ),
        *_refused(
            TRAINING + "; x = torch.ones(9, 3); three = Loader((x, x, x[:, :2]), 4, 'cpu')",
            "Trainer(model, three, None, criterion, optimizer)",
        ),
        Case(
            "Trainer(model, pairs, criterion, optimizer)",
            TRAINING + "; train_loader = pairs",
            at="Trainer(model, pairs, criterion, optimizer)",
        ),
        Case(
            "Trainer(model, pairs, None, torch.nn.L1Loss(reduction='sum'), optimizer, config={'gradient_accumulation_steps': 2})",
            TRAINING,
            at="torch.nn.L1Loss(reduction='sum')",
        ),
        Case(
            "Trainer(model, pairs, None, criterion, optimizer, config={'output_dir': 'runs/a'})",
            TRAINING,
            at="config={'output_dir': 'runs/a'}",
        ),
        *(
            Case(
                f"TrainerOf({given})",
                TRAINING
                + "; store = dataset.float()[:, None], dataset.float()[:, None]; model = torch.nn.Linear(1, 1); pairs = Loader(store, 4, 'cpu')"
                + "; TrainerOf = lambda **others: Trainer(model, **{'train_loader': pairs, 'criterion': criterion, 'optimizer': torch.optim.SGD(model.parameters())} | others)",
                at=given,
            )
            for given in ("schedulr=None", "output_dir='runs/b'", "lr=0.1", "batch_size=4")
        ),
        Case(
            "Trainer(model, pairs, None, criterion, optimizer, callbacks=[])",
            TRAINING,
        ),
        *(
            Case(f"Trainer(model, pairs, None, criterion, optimizer, {given})", TRAINING, at=given)
            for given in ("epochs=3", "max_steps=2")
        ),
        Case("check_steps(slow)", TRAINING, at="slow"),
        Case(
            "check_scheduler([first, second], False)",
            TRAINING
            + "; o = torch.optim.SGD(model.parameters()); first, second = (torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for _ in '12')",
            at="[first, second]",
        ),
        *_refused(
            TRAINING,
            "Trainer(model, pairs, pairs, criterion, optimizer, plateau, scheduler_interval='update')",
            "Trainer(model, pairs, pairs, criterion, optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, 'max'))",
            "Trainer(model, pairs, pairs, criterion, optimizer, metrics={})",
            "Trainer(model, pairs, None, criterion, optimizer, plateau, config={'monitor': 'x'})",
            "Trainer(model, pairs, None, criterion, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3), {'epochs': 3})",
            "Trainer(model, pairs, None, criterion, optimizer, scheduler_interval='batch')",
            "Trainer(model, pairs, None, criterion=None, optimizer=optimizer)",
        ),
        Case(
            "Trainer(model, pairs, pairs, criterion, optimizer, plateau).train_epoch()",
            TRAINING
            + "; scheduler = plateau; trainer = Trainer(model, pairs, pairs, criterion, optimizer)",
            at="Trainer(model, pairs, pairs, criterion, optimizer, plateau).train_epoch()",
        ),
        Case("read_config(config=3)", TRAINING, fill={"my.yaml": "tabular.yaml"}),
        Case("read_config(config={'training': {}})", TRAINING, fill={"my.yaml": "tabular.yaml"}),
        Case("read_config({'clip_nrm': 1.0})", TRAINING, at="clip_nrm"),
        Case("read_config(dict(use_amp='x'))", TRAINING, into="dict"),
        Case("read_config(dict(use_amp=True, precision='fp32'))", TRAINING),
        Case("read_config(dict(lr=1.0, learning_rate=2.0))", TRAINING),
        Case("loadable({'a': x})", TRAINING + "; x = np.float32(1)"),
        Case("loadable({key: 1})", TRAINING + "; key = (1, 2)"),
        Case(
            "Checkpoints('c').save({}, 1, 1, identity={'a': object()})",
            TRAINING,
            at="{'a': object()}",
        ),
        Case(
            "place(DataLoader(dataset)).load_state_dict(saved)",
            TRAINING
            + "; place = ForeignPosition; first = place(DataLoader(dataset, generator=torch.Generator())); saved = first.state_dict()",
        ),
        Case(
            "quantize_dynamic(reads, [torch.zeros(2, 3)])",
            TRAINING,
            fill={"name.of.the.module": "inner"},
        ),
    ],
    "plan": _refused(
        "from stoker.plan.facts import even_chunks; from stoker.plan import make_plan, estimate_model, store_facts; from stoker.store.reader import open_store; "
        "facts = store_facts(open_store('store').manifest)",
        "make_plan(facts, gpu_memory_bytes=10**9, ram_bytes=10**9, ranks_per_host=0)",
        "estimate_model(-1)",
        "even_chunks(10, most=0)",
        "make_plan(facts, gpu_memory_bytes=10**9, ram_bytes=10**10, batch_size=16, data_bytes=1)",
        "store_facts(open_store('store').manifest, fields=['x'])",
    ),
    "store": [
        Case("open_store('grouped.h5', group='Train')", GROUPED),
        Case("open_store('store', group='train')", GROUPED),
    ]
    + _refused(
        STORE,
        "store.read_rows('x', 0, 1)",
        "store.read_rows('features', 0, 2, out=np.empty(3))",
        "open_hdf5(Path('none/none.h5'))",
        "open_hdf5(Path('empty'))",
        "OpenFile(Path('none/x.h5'))",
        "Ragged(values, lengths)",
    )
    + [
        Case("checked_values(words)", STORE, fill={"values": "words"}),
        Case("Dense(values)", STORE + "values = np.ones(3, 'c8')", at="values"),
        Case("open_store('uneven.h5')", UNEVEN),
        Case("open_store('uneven.h5', rows=5)", UNEVEN),
        Case("open_store('uneven.h5', fields=['xx'])", UNEVEN),
        Case("open_store('uneven.h5', fields=['x', 'bins'])", UNEVEN),
        Case("open_store('uneven.h5', group='deeq')", UNEVEN),
        Case("open_store('store', rows=5)", UNEVEN),
        Case("open_store('virtual.h5')", VIRTUAL),
        Case(
            "fit_repairs([parse_repair('clip')], whole, columns)", STORE, fill={"values": "whole"}
        ),
        Case("bad_rows(table, limits)", STORE, at="limits", fill={"values": "table"}),
        Case(
            "store.read_text('tokens', 0)",
            STORE
            + "write_store(Path('words'), [{'tokens': Ragged(np.arange(5), [0, 2, 5])}]).close(); store = open_store('words')",
            at="store.read_text('tokens', 0)",
        ),
        Case(REMOTE, STORE, env={"STOKER_CACHE_LIMIT": "x", "STOKER_CACHE": "cache"}),
        Case(REMOTE, STORE, env={"STOKER_CACHE_LIMIT": "1KB", "STOKER_CACHE": "cache"}),
        Case(REMOTE, STORE, env={"STOKER_CACHE": "table.csv/cache"}),
        Case(
            "open_store(folder)",
            STORE
            + "folder = open_store(f'file://{here}/store').path; Path('once').exists() or (folder / 'remote.json').write_text('{}'); Path('once').touch()",
            env={"STOKER_CACHE": "cache"},
        ),
    ],
    "packing": [
        Case("stoker.pack('table.csv', 'made', target='label')", SAMPLES, then="pack was given"),
        Case("stoker.pack('tabel.csv', 'made')", SAMPLES, at="tabel.csv", then="pack was given"),
        Case(
            "stoker.pack({'x': x}, 'made')",
            SAMPLES,
            fill={"SAMPLES": "{'x': [1, 2]}", "OUT": "'made'"},
            at="stoker.pack({'x': x}, 'made')",
        ),
        Case(
            "stoker.pack(source, 'made', target='label')",
            SAMPLES
            + "; from stoker.sources.tables import TableSource; source = TableSource(('table.csv',), target='label')",
        ),
    ]
    + _refused(
        SAMPLES,
        "stoker.pack_from([{'x': np.arange(3)}], 'made', ragged='x')",
        "stoker.pack_from(iter([1, 2]), 'made', options=PackOptions(cluster='tcp://x'))",
    ),
    "sources": [
        Case("collect([{'a/b': 1}])", SAMPLES, at="{'a/b': 1}"),
        Case(
            "stoker.pack_from((x), 'made')",
            SAMPLES
            + "; x = type('S', (), {'tocsr': 0, 'toarray': lambda self: np.ones((3, 2))})()",
            at="(x)",
        ),
        Case(
            "stoker.pack_from(Rows, 'made')",
            SAMPLES
            + "; Rows = type('Rows', (list,), {'__init__': lambda self, *_: list.__init__(self, [{'x': np.ones(3)}] * 9)})",
            at="Rows",
        ),
        Case(
            "assert collect([dict(x=(x)) for x in (1, 1.5)])['x'].values[1] == 1.5",
            SAMPLES,
            at="(x)",
        ),
        *(
            Case("as_array(value, 'x')", SAMPLES + "; value = " + value)
            for value in (
                "torch.zeros(2).bfloat16()",
                "torch.eye(3).to_sparse()",
                "[None]",
                "np.ones(3, 'c8')",
                "np.zeros(3, 'M8[s]')",
                "np.ma.masked_array([1.0, 2.0], [0, 1])",
                "bytes([255, 216, 0])",
            )
        ),
        *(
            Case("collect([{'x': value}])", SAMPLES + "; value = " + value, at="{'x': value}")
            for value in ("{'a': 1, 'b': 2}", "[np.zeros(3), np.zeros((4, 2))]")
        ),
        Case(
            "Loader({'x': value}, 64)",
            "import h5py; f = h5py.File('kept.h5', 'a'); f.require_dataset('train/x', (9,), 'i8'); value = f['train']",
            at="Loader({'x': value}, 64)",
        ),
    ]
    + _refused(
        SAMPLES,
        "stoker.pack_from(late, 'made')",
        "stoker.pack_from([{'x': x}], 'made', ragged=['X'])",
        "stoker.pack_from(dataloader, 'made')",
        "stoker.pack_from(3, 'made')",
        "stoker.pack_from({'x': x, 'z': z}, 'made')",
    )
    + _refused(
        SOURCES,
        "ArraysSource(()).prepare(Path('made'))",
        "TableSource(()).prepare(Path('made'))",
        "TableSource((path,), split=(1, 2))",
        "TableSource((path,), missing='x')",
        "TableSource((path,), dtypes={'a': 'x'})",
        "BarsSource(('bars',), windows=(('M5', 8),), ratios=(1, 2, 3))",
        "MassSpecSource(path, train_ratio=2)",
        "list(read_msp('cut.msp.gz'))",
        "split_msp(path, records_per_part=0)",
        "ImagesSource(folder=Path('none'), size=(8, 8)).prepare(Path('made'))",
        "MolIndex(broken)",
    )
    + [
        Case("split_msp('only.msp.gz', 10)", SOURCES, then="is gzipped"),
        Case("list(read_msp(path, merge='x'))", SOURCES, into="read_msp"),
    ],
    "compat": _refused(
        COMPAT,
        "RandomSampler(object())",
        "RandomSampler()",
        "find_max_batch_size(model, (4,), 'cpu', max_batch=0)",
        "find_max_batch_size(model, (4,), 'cpu', max_batch=2, margin=3)",
        "find_max_batch_size(whole, (4,), 'cpu', max_batch=2)",
        "DataLoader(list(range(9)), shuffle=True, sampler=RandomSampler(9))",
        "PrefetchingDataLoader()",
        "quantize_dynamic(torch.nn.Linear(3, 2), dtype=torch.float16)",
        "Normalize((0.5, 0.5), (0.5, 0.5)).apply(torch.randn(3, 8, 8))",
    )
    + [
        Case("RandomCrop(99, padding=1).apply(torch.randn(3, 8, 8))", COMPAT, into="RandomCrop"),
        Case(
            "ChunkDataLoader('pairs.h5', 4, 1.0, 'cpu', sampler=3)",
            COMPAT
            + "; import h5py; from stoker import ChunkDataLoader; file = h5py.File('pairs.h5', 'w'); file['features'] = np.zeros((9, 2)); file['targets'] = np.zeros(9); file.close()",
        ),
        Case(
            "pass\nloader.load_batch_async(0, batch)",
            COMPAT + "; loader.load_batch_async(0, batch)",
            at="pass",
        ),
        Case("pass\nloader.synchronize(0)", COMPAT, at="pass"),
        Case("dataset[1:3]", COMPAT, at="dataset[1:3]"),
        Case(
            "list(DataLoader(dataset, 2))",
            COMPAT + "; dataset = Fails()",
            at="list(DataLoader(dataset, 2))",
            then="division",
        ),
        Case(
            "loader._load_chunk_to_gpu(3, 1)",
            COMPAT + "; loader = ChunkDataLoader('store', 8, device='cpu')",
        ),
        Case("NISTDataLoader.create_dataloaders(dataset, train_ratio=2)", SPECTRA),
        Case("NISTDataLoader.create_dataloaders([1])", SPECTRA, at="[1]"),
        Case("dataset.read_batch([])", SPECTRA),
        Case("dataset['x']", SPECTRA, at="dataset['x']"),
        Case("LazyMassSpecDataset(bare, 'mols', jobs=1)", SPECTRA),
        Case(
            "find_max_batch_size(model, (0,), 'cpu', max_batch=2)",
            COMPAT + "; model = torch.nn.Conv2d(3, 1, 9, 9)",
            at="(0,)",
        ),
    ],
    "runs": [Case("Monitor('table.csv')", "from stoker.monitor import Monitor")],
    "monitor.py": [
        Case(
            "next(Monitor().looks(interval_seconds=0, stop=stop))",
            "import threading; from stoker.monitor import Monitor; stop = threading.Event()",
            into="looks",
        ),
    ],
    "frameworks": _refused(
        ADAPTED,
        "loader.seek(epoch, -1)",
    )
    + _refused(
        "from stoker.frameworks.lightning import ScheduleCallback",
        "ScheduleCallback(warmup_share=2)",
        "ScheduleCallback(num_updates=0)",
        "ScheduleCallback(rule='x')",
    )
    + [
        Case("check_share(Loader('store', 8, 'cpu'), 1, 2)", ADAPTED, into="Loader"),
        Case("AdaptedLoader([1])", ADAPTED, at="[1]"),
        Case(
            "check_makes(Loader('store', 8, 'cpu'), 'train')",
            ADAPTED
            + "; from functools import partial; from stoker.frameworks.adapted import check_makes",
            at="Loader('store', 8, 'cpu')",
        ),
        Case(
            "next(iter(AdaptedLoader(Loader('store', 8, 'cpu'), fields={'x': 'y'})))",
            ADAPTED,
            into="AdaptedLoader",
        ),
    ],
    "recipes": [
        Case(
            "deploy(trained, Sizes())",
            RECIPES
            + "\nclass Without(TabularRecipe):\n    export_layout = lambda self, *parts: None\n"
            + "trained = load_trained('run/best.pt'); trained = replace(trained, chosen=replace(trained.chosen, recipe=Without()))",
        ),
        Case(
            "restore('mine_7:Autoencoder', {})",
            OWN + RECIPES + "; own('mine_7', folder='code')",
            fill={"FOLDER": "code"},
        ),
        Case("load_trained('run/best.pt', recipe='forex')", RECIPES, fill={"STORE": "forex-store"}),
        Case("split_compounds(apart, (0.8, 0.1, 0.1), 0)", RECIPES),
        Case(
            "list(read_molecules_of(Path('table.csv')))",
            "from stoker.recipes.massspec.molecules import read_molecules_of",
        ),
        Case(
            "list(read_molecules_of(Path('no-molecules')))",
            "from stoker.recipes.massspec.molecules import read_molecules_of; Path('no-molecules').mkdir()",
        ),
        Case(
            "list(read_molecules_of(Path('bad.parquet')))",
            "from stoker.recipes.massspec.molecules import read_molecules_of; Path('bad.parquet').write_bytes(b'PAR1')",
        ),
        Case(
            "list(read_molecules_of(Path('long.csv')))",
            "from stoker.recipes.massspec.molecules import read_molecules_of; "
            "Path('long.csv').write_text('smiles\\n' + 'C' * 200000)",
        ),
        *_refused(
            "from stoker.recipes.images.networks import *; from stoker.recipes.images.recipe import *; "
            "import torch, sys; from types import SimpleNamespace; "
            "library = SimpleNamespace(list_models=lambda: ['pair'], create_model=lambda name, num_classes, in_chans: torch.nn.Flatten()); "
            "sys.modules['timm'] = library; sys.modules.setdefault('torchvision.models', SimpleNamespace(list_models=lambda: []))"
            "\nsys.modules.setdefault('torchvision', SimpleNamespace())\n"
            "def call(network): make_network(choose_network(network, (32, 32))[0], 3, 3, 4, (32, 32))\n"
            "def split(ratios): split_pictures(pictures, np.zeros(9, 'i8'), ratios, 0)\n"
            "def fill(ratios): fill_parts({'train': np.arange(1), 'val': np.arange(0), 'test': np.arange(0)}, ratios, 0, None, 'rows')\n"
            "pictures = write_store(Path('pictures-store'), [{'labels': Dense(np.zeros(9, 'i8'))}])",
            "call(network='resnet99x')",
            "call(network='timm/pair')",
            "split(ratios=[0.0, 0.5, 0.5])",
            "fill(ratios=[0.8, 0.1, 0.1])",
            "load_weights(ResNet9(3, width=4), 'none/weights.pt')",
            "load_weights(ResNet9(3, width=4), 'table.csv')",
        ),
        Case("parse_options(TabularRecipe.Options, dict(hiden=1), 'tabular')", RECIPES),
        Case("lr_factor(128, 128, 'x', None)", RECIPES, at="'x'"),
    ],
    "units.py": _refused(
        "from stoker.units import usable_count\ndef call(n): usable_count('n', n)",
        "call(n=True)",
        "call(n='x')",
        "call(n=0)",
    )
    + [
        Case(
            "call(size='nan')",
            "from stoker.units import parse_bytes\ndef call(size): parse_bytes(float(size) if size == 'nan' else size)",
            at="nan",
        )
    ],
    "report.py": [
        Case("read_run_log('none/run.jsonl')", "from stoker.report import read_run_log"),
        Case(
            "run.write('step')",
            "from stoker.report import RunLog; path = Path('new.jsonl'); run = RunLog(path); run.close()",
            at="run",
        ),
        Case(
            "read_run_log('told/run.jsonl')",
            "from stoker.report import read_run_log; log = Path('told/run.jsonl'); Path('once').exists() or log.write_text('x' + chr(10) + log.read_text()); Path('once').touch()",
        ),
    ],
    "arguments.py": _refused(
        "from stoker import PackOptions, GPUAugmentation",
        "PackOptions(jobs='all')",
    )
    + [Case("GPUAugmentation(flip=True)", "from stoker import GPUAugmentation", at="flip=True")],
    "errors.py": _refused(
        "from stoker.errors import *",
        "raise file_error(PermissionError(13, 'no', 'sub/table.csv'))",
        "raise unwritable('made/x', OSError(30, 'read-only'), 'the log')",
        "require_file('none/x.csv', 'the table')",
        "require_file('/dev/null', 'the table')",
    )
    + [
        Case(
            "require_utf8(name)",
            "from stoker.errors import *; import os; name = os.fsdecode(b'\\xff.csv'); open(name, 'w').close()",
            then="not UTF-8",
        )
    ],
    "config": [
        Case("parse_config('data: 3')", "from stoker.config import parse_config", at="data: 3"),
        Case(
            "resolve('tabular')",
            "from stoker.config import load_config, resolve; Path('my.yaml').touch()",
            at="resolve('tabular')",
        ),
        Case(
            "load_config('tabular', overrides='training.lr=1')",
            "from stoker.config import load_config",
            at="overrides='training.lr=1'",
        ),
        Case(
            "load_config({})",
            "from stoker.config import load_config; Path('my.yaml').touch()",
            at="load_config({})",
        ),
        *(
            Case(wrong, "from stoker import TrainSettings")
            for wrong in (
                "TrainSettings(precision='x')",
                "TrainSettings(clip_norm=-1)",
                "TrainSettings(accumulation_steps=0)",
                "TrainSettings(nothing_like_it=3)",
            )
        ),
        Case("TrainSettings(epoch=3)", "from stoker import TrainSettings", at="epoch=3"),
    ],
    "doctor": [
        Case(
            "run_script([])",
            "from stoker.doctor.attach import run_script; Path('train.py').touch()",
        ),
        Case(
            "run_script(['python', 'train.py'], steps=0)",
            "from stoker.doctor.attach import run_script; Path('train.py').touch()",
        ),
    ],
}
