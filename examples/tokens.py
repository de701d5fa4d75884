"""A small GPT on the bytes of a text: packed once, windows cut on the device, resumed in the middle of an epoch."""

import tempfile
from pathlib import Path

import torch
from torch import nn

from stoker import Loader, PackOptions, pack
from stoker.sources.series import SeriesSource

LENGTH, WIDTH = 64, 64


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        seen = self.token(tokens) + self.place.weight
        return self.head(self.layers(seen, mask=self.mask, is_causal=True))


with tempfile.TemporaryDirectory() as folder:
    text = Path(folder, "text.txt")
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    # A window has one token more than the model sees: its targets are the tokens behind.
    source = SeriesSource((text,), LENGTH + 1, stride=LENGTH, dtype="uint8", name="tokens")
    pack(source, Path(folder, "store"), PackOptions(jobs=1))
    with Loader(Path(folder, "store"), 64, order="shuffled", seed=1) as loader:
        model = Gpt().to(loader.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(2):
            for batch in loader:  # batch["tokens"] is (64, 65), uint8, and already on the device
                tokens = batch["tokens"].long()
                logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        state = loader.state_dict()  # with the model's and the optimizer's, a run resumes exactly
        print(f"{loader.reason}\nlast loss {loss.item():.3f}; at epoch {state['epoch']}")
