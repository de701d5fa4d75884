"""Commands that are refused, by the part of the package that refuses them."""

from __future__ import annotations

from advice_typing import Case

ON_CPU = ["--device", "cpu"]
BENCH = ["bench", "augment", "--device", "cpu"]
PREVIEW = ["augment", "preview", "pictures/cat", "x.png"]
TRAIN = ["train", "--config", "tabular.yaml", *ON_CPU]
BARS = ["pack", "bars", "bars/EURUSD_M5.csv", "bars/EURUSD_H1.csv", "made", "--windows", "M5=8,H1=4"]

COMMANDS: dict[str, list[Case]] = {
    "augment": [
        Case(["bench", "augment", "--repeats", "0", *ON_CPU]),
        Case(["augment", "preview", "none/none", "x.png"]),
        Case(["augment", "preview", "empty", "x.png"]),
        Case(["augment", "preview", "pictures/cat", "x.png", "--masks", "masks/cat/0.png"]),
        Case(["augment", "preview", "pictures/cat", "x.png", "--masks", "masks"]),
        Case(["augment", "preview", "store", "x.png"], at="store", fill={"store": "seg-store"}),
        Case(["augment", "preview", "seg-store", "x.png", "--size", "8x8"]),
        Case(["augment", "preview", "seg-store", "x.png", "--masks", "masks"]),
        Case(["augment", "preview", "pictures/cat", "empty"], at="empty"),
        Case(["augment", "preview", "pictures/cat", "x.jpg"], at="x.jpg"),
        Case(["augment", "preview", "pictures/cat", "none/none/x.png"]),
        Case(["augment", "preview", "pictures/cat", "x.png"], "open('x.png', 'w').write('x')", at="x.png"),
        Case(["augment", "preview", "pictures/cat", "pictures/cat/x.png"], at="pictures/cat/x.png"),
    ],
    "cli": [
        Case(["augment", "pictures", "new/folder"]),
        Case([*PREVIEW, "--size", "1x1"]),
        Case([*PREVIEW, "--preset", "none"]),
        Case([*PREVIEW, "--rows", "0"]),
        Case([*PREVIEW, "--preset", "strong", "--config", "aug.yaml"], "open('aug.yaml', 'w').write('training: {use_gpu_augmentation: true}')"),
        Case([*PREVIEW, "--config", "config.yaml"]),
        Case(["bench", "memory"]),
        Case(["bench", "memory", "--msp", "library.msp", "--ram-gb", "0"]),
        Case([*BENCH, "--batch", "0"]),
        Case([*BENCH, "--size", "1x1"]),
        Case([*BENCH, "--input", "x"]),
        Case(["bench", "augment", "--device", "x"]),
        Case(["bench", "augment", "--device", "cuda:99"]),
        Case([*BENCH, "--workers", "x"]),
        Case(["doctor"]),
        Case(["doctor", "--set", "training.lr=1", "--", "python", "train.py"], "open('train.py', 'w').write('')"),
        Case(["doctor", "--json", "--", "python", "train.py"], "open('train.py', 'w').write('')"),
        Case(["export", "run/best.pt", "out.safetensors", "--opset", "18"], at="out.safetensors"),
        Case(["export", "run/best.pt", "out.onnx", "--batch", "x"]),
        Case(["migrate-config", "config.yaml", "none/new.yaml"]),
        Case(["monitor", "--interval", "0", "--once"]),
        Case(["inspect", "table.csv", "--html", "empty"]),
        Case(["inspect", "table.csv", "--html", "none/none/x.html"]),
        Case(["inspect", "table.csv", "--html", "table.csv"]),
        Case(["tune", "--config", "tabular.yaml", "--out", "config.yaml", *ON_CPU]),
        Case(["pack", "table", "table.csv"], at="table.csv"),
        Case(["pack", "table", "table.csv", "made", "--split", "x"]),
        Case([*BARS, "--split-at", "2020"]),
        Case(["plan"]),
        Case(["plan", "store", "--gpu-memory", "16GB", "--parameters", "x"]),
        Case(["plan", "store", "--gpu-memory", "16GB", "--activations", "2MB"]),
        Case(["profile"]),
        Case([*TRAIN, "--gpus", "99"], then=""),
        Case([*TRAIN, "--gpus", "2"], env={"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"}),
        Case(["train", "--config", "tabular.yaml", "--msp", "library.msp"]),
        Case(["train", "--config", "configs/massspec.yaml", "--mol-dir", "mols"]),
        Case(["tune"]),
    ],
}  # fmt: skip
