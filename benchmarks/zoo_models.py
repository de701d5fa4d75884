"""Models that nobody here wrote, built from their configuration without weights, with batches for each.

Each builder returns an `Entry`: the model, a function that makes one batch on the device, and the criterion.
Batches are small, because that is where launches cost most; a few entries keep the GPU busy by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

BUILDERS: dict[str, Callable[[], Any]] = {}


@dataclass
class Entry:
    """A model and what it trains on.

    Attributes:
        batch: Samples of a batch.
        make: Makes (inputs, targets) on a device.
    """

    model: nn.Module
    batch: int
    make: Callable[[torch.device], tuple[Any, torch.Tensor]]
    criterion: Callable[[Any, torch.Tensor], torch.Tensor] = functional.cross_entropy
    precision: str = "bf16"


@dataclass
class Loop:
    """A step that no Trainer has: several models and optimizers, trained by a function of one batch.

    Attributes:
        batch: Samples of a batch.
        make: Makes (inputs, targets) on a device; the targets are None.
        build: Makes modules, their optimizers and the step; called with the device, a function that each module goes
            through (torch.compile, or nothing) and options of the optimizers.
    """

    batch: int
    make: Callable[[torch.device], tuple[Any, Any]]
    build: Callable[..., tuple[list[nn.Module], list[torch.optim.Optimizer], Callable[[Any], Any]]]
    precision: str = "bf16"


def entry(build: Callable[[], Any]) -> Callable[[], Any]:
    BUILDERS[build.__name__] = build
    return build


class Call(nn.Module):
    """Calls a model as its library wants it, and returns one tensor."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self._call = call

    def forward(self, inputs: Any) -> torch.Tensor:
        return self._call(self.model, inputs)


def pictures(batch: int, side: int, classes: int = 10):
    def make(device):
        images = torch.randn(batch, 3, side, side, device=device)
        return images, torch.randint(0, classes, (batch,), device=device)

    return make


def masks(batch: int, side: int, classes: int):
    def make(device):
        images = torch.randn(batch, 3, side, side, device=device)
        return images, torch.randint(0, classes, (batch, side, side), device=device)

    return make


def words(batch: int, length: int, vocabulary: int, classes: int | None = None):
    def make(device):
        ids = torch.randint(5, vocabulary, (batch, length), device=device)
        if classes is None:
            return ids, ids.roll(-1, 1)
        return ids, torch.randint(0, classes, (batch,), device=device)

    return make


def next_word(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def classifier(name: str, batch: int, side: int, **options: Any) -> Entry:
    import torchvision

    model = torchvision.models.get_model(name, weights=None, num_classes=10, **options)
    if name == "inception_v3":
        model.aux_logits = False
    return Entry(model, batch, pictures(batch, side))


# -- torchvision ------------------------------------------------------------------------------


@entry
def resnet18() -> Entry:
    return classifier("resnet18", 64, 32)


@entry
def resnet50() -> Entry:
    return classifier("resnet50", 32, 64)


@entry
def resnet50_224() -> Entry:
    return classifier("resnet50", 64, 224)


@entry
def convnext_tiny() -> Entry:
    return classifier("convnext_tiny", 32, 64)


@entry
def efficientnet_b0() -> Entry:
    return classifier("efficientnet_b0", 32, 64)


@entry
def mobilenet_v3_small() -> Entry:
    return classifier("mobilenet_v3_small", 64, 64)


@entry
def densenet121() -> Entry:
    return classifier("densenet121", 32, 64)


@entry
def regnet_y_400mf() -> Entry:
    return classifier("regnet_y_400mf", 32, 64)


@entry
def shufflenet_v2() -> Entry:
    return classifier("shufflenet_v2_x1_0", 64, 64)


@entry
def vit_patch8() -> Entry:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(64, 8, 6, 6, 384, 1536, num_classes=10)
    return Entry(model, 64, pictures(64, 64))


@entry
def swin_t() -> Entry:
    return classifier("swin_t", 16, 128)


@entry
def fcn_resnet50() -> Entry:
    from torchvision.models.segmentation import fcn_resnet50 as make

    model = make(weights=None, weights_backbone=None, num_classes=5)
    return Entry(Call(model, lambda m, x: m(x)["out"]), 8, masks(8, 64, 5))


@entry
def deeplab_mobilenet() -> Entry:
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large as make

    model = make(weights=None, weights_backbone=None, num_classes=5)
    return Entry(Call(model, lambda m, x: m(x)["out"]), 8, masks(8, 128, 5))


# -- transformers -----------------------------------------------------------------------------


@entry
def gpt2_small() -> Entry:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=4096, n_positions=128, n_embd=256, n_layer=6, n_head=4)
    model = Call(GPT2LMHeadModel(config), lambda m, ids: m(input_ids=ids, use_cache=False).logits)
    return Entry(model, 16, words(16, 128, 4096), next_word)


@entry
def llama_small() -> Entry:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = Call(LlamaForCausalLM(config), lambda m, ids: m(input_ids=ids, use_cache=False).logits)
    return Entry(model, 16, words(16, 128, 4096), next_word)


@entry
def bert_small() -> Entry:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=4096,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=1024,
        num_labels=5,
    )
    model = Call(BertForSequenceClassification(config), lambda m, ids: m(input_ids=ids).logits)
    return Entry(model, 32, words(32, 64, 4096, 5))


@entry
def t5_small() -> Entry:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=4096, d_model=256, d_ff=512, num_layers=4, num_heads=4, d_kv=64)
    model = Call(
        T5ForConditionalGeneration(config),
        lambda m, ids: m(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits,
    )
    return Entry(model, 16, words(16, 64, 4096), next_word)


@entry
def whisper_encoder() -> Entry:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=256, encoder_layers=4, encoder_attention_heads=4, encoder_ffn_dim=1024
    )
    encoder = Call(WhisperEncoder(config), lambda m, x: m(x).last_hidden_state.mean(1))
    model = nn.Sequential(encoder, nn.Linear(256, 10))

    def make(device):
        sound = torch.randn(8, 80, 3000, device=device)
        return sound, torch.randint(0, 10, (8,), device=device)

    return Entry(model, 8, make)


# -- torch-geometric: one graph of fixed size, or a fixed number of molecules ------------------


def graph(nodes: int, edges: int, features: int, classes: int):
    def make(device):
        x = torch.randn(nodes, features, device=device)
        index = torch.randint(0, nodes, (2, edges), device=device)
        return (x, index), torch.randint(0, classes, (nodes,), device=device)

    return make


@entry
def gcn() -> Entry:
    from torch_geometric.nn import GCN

    model = Call(GCN(64, 128, 3, 7), lambda m, x: m(x[0], x[1]))
    return Entry(model, 2048, graph(2048, 8192, 64, 7), precision="fp32")


@entry
def gat() -> Entry:
    from torch_geometric.nn import GAT

    model = Call(GAT(64, 128, 3, 7, heads=4), lambda m, x: m(x[0], x[1]))
    return Entry(model, 2048, graph(2048, 8192, 64, 7), precision="fp32")


@entry
def gin() -> Entry:
    from torch_geometric.nn import GIN

    model = Call(GIN(64, 128, 3, 7), lambda m, x: m(x[0], x[1]))
    return Entry(model, 2048, graph(2048, 8192, 64, 7), precision="fp32")


# -- layers of torch ---------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], width: int, layers: int) -> None:
        super().__init__()
        self.layers = kind(32, width, layers, batch_first=True)
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)[0][:, -1])


def series(batch: int, length: int, features: int, classes: int = 3):
    def make(device):
        x = torch.randn(batch, length, features, device=device)
        return x, torch.randint(0, classes, (batch,), device=device)

    return make


@entry
def lstm() -> Entry:
    return Entry(Recurrent(nn.LSTM, 128, 2), 64, series(64, 60, 32))


@entry
def gru() -> Entry:
    return Entry(Recurrent(nn.GRU, 128, 2), 64, series(64, 60, 32))


@entry
def tcn() -> Entry:
    layers: list[nn.Module] = []
    for level in range(6):
        gap = 2**level
        width = 32 if level == 0 else 64
        layers += [nn.Conv1d(width, 64, 3, padding=gap, dilation=gap), nn.ReLU(), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 3))
    return Entry(Call(model, lambda m, x: m(x.transpose(1, 2))), 64, series(64, 60, 32))


@entry
def torch_transformer() -> Entry:
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model = nn.Sequential(nn.Linear(32, 128), encoder, nn.Flatten(), nn.Linear(60 * 128, 3))
    return Entry(model, 64, series(64, 60, 32))


@entry
def tabular_transformer() -> Entry:
    class Tokens(nn.Module):
        """One learned token a column, scaled by the column's value."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(48, 64) * 0.02)
            self.bias = nn.Parameter(torch.zeros(48, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :, None] * self.weight + self.bias

    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    model = nn.Sequential(Tokens(), encoder, nn.Flatten(), nn.Linear(48 * 64, 2))

    def make(device):
        x = torch.randn(256, 48, device=device)
        return x, torch.randint(0, 2, (256,), device=device)

    return Entry(model, 256, make)


@entry
def mlp_mixer() -> Entry:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(128), nn.LayerNorm(128)])
            self.tokens = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
            self.channels = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
            return x + self.channels(self.norms[1](x))

    stem = Call(nn.Conv2d(3, 128, 8, 8), lambda m, x: m(x).flatten(2).transpose(1, 2))
    body = [Mixer() for _ in range(6)]
    model = nn.Sequential(stem, *body, nn.Flatten(), nn.Linear(64 * 128, 10))
    return Entry(model, 64, pictures(64, 64))


@entry
def unet() -> Entry:
    class Block(nn.Sequential):
        def __init__(self, enters: int, leaves: int) -> None:
            super().__init__(
                nn.Conv2d(enters, leaves, 3, padding=1),
                nn.BatchNorm2d(leaves),
                nn.ReLU(inplace=True),
                nn.Conv2d(leaves, leaves, 3, padding=1),
                nn.BatchNorm2d(leaves),
                nn.ReLU(inplace=True),
            )

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = (32, 64, 128, 256)
            self.down = nn.ModuleList(
                [Block(a, b) for a, b in zip((3, *sizes), sizes, strict=False)]
            )
            self.up = nn.ModuleList(
                [
                    nn.ConvTranspose2d(b, a, 2, 2)
                    for a, b in zip(sizes[-2::-1], sizes[:0:-1], strict=True)
                ]
            )
            self.join = nn.ModuleList([Block(2 * a, a) for a in sizes[-2::-1]])
            self.head = nn.Conv2d(32, 5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = []
            for number, block in enumerate(self.down):
                x = block(x if number == 0 else functional.max_pool2d(x, 2))
                kept.append(x)
            for up, join, side in zip(self.up, self.join, kept[-2::-1], strict=True):
                x = join(torch.cat((up(x), side), 1))
            return self.head(x)

    return Entry(UNet(), 8, masks(8, 64, 5))


@entry
def autoencoder() -> Entry:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1),
        nn.GELU(),
        nn.Conv2d(32, 64, 4, 2, 1),
        nn.GELU(),
        nn.Conv2d(64, 16, 3, 1, 1),
        nn.ConvTranspose2d(16, 64, 4, 2, 1),
        nn.GELU(),
        nn.ConvTranspose2d(64, 3, 4, 2, 1),
    )

    def make(device):
        images = torch.randn(64, 3, 64, 64, device=device)
        return images, images

    return Entry(model, 64, make, functional.mse_loss)


@entry
def gan() -> Loop:
    """DCGAN on 32 x 32 pictures: the judge's update, then the maker's, by two optimizers."""

    def build(device, through, **options):
        def down(enters: int, leaves: int) -> list[nn.Module]:
            return [nn.Conv2d(enters, leaves, 4, 2, 1), nn.BatchNorm2d(leaves), nn.LeakyReLU(0.2)]

        def up(enters: int, leaves: int) -> list[nn.Module]:
            layer = nn.ConvTranspose2d(enters, leaves, 4, 2, 1, bias=False)
            return [layer, nn.BatchNorm2d(leaves), nn.ReLU()]

        maker = nn.Sequential(
            nn.ConvTranspose2d(100, 256, 4, 1, 0), nn.ReLU(), *up(256, 128), *up(128, 64),
            nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh(),
        ).to(device)  # fmt: skip
        judge = nn.Sequential(
            *down(3, 64), *down(64, 128), *down(128, 256), nn.Conv2d(256, 1, 4), nn.Flatten()
        ).to(device)
        optimizers = [
            torch.optim.Adam(one.parameters(), lr=2e-4, betas=(0.5, 0.999), **options)
            for one in (maker, judge)
        ]
        make, judged = through(maker), through(judge)

        def step(batch):
            (noise, real), _ = batch
            with torch.autocast(device.type, torch.bfloat16):
                fake = make(noise)
                loss = (
                    functional.softplus(-judged(real).float())
                    + functional.softplus(judged(fake.detach()).float())
                ).mean()
            optimizers[1].zero_grad(set_to_none=True)
            loss.backward()
            optimizers[1].step()
            with torch.autocast(device.type, torch.bfloat16):
                made = functional.softplus(-judged(fake).float()).mean()
            optimizers[0].zero_grad(set_to_none=True)
            made.backward()
            optimizers[0].step()
            return loss.detach() + made.detach()

        return [maker, judge], optimizers, step

    def make(device):
        noise = torch.randn(64, 100, 1, 1, device=device)
        return (noise, torch.randn(64, 3, 32, 32, device=device)), None

    return Loop(64, make, build)
