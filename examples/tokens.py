"""A small GPT on the bytes of a text: packed once, windows cut on the device; `Loader.state_dict` resumes exactly."""

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
        self.token, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.token(tokens), src_mask=self.mask, is_causal=True))


with tempfile.TemporaryDirectory() as folder:
    Path(folder, "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    source = SeriesSource((Path(folder, "text.txt"),), LENGTH + 1, stride=LENGTH, dtype="uint8")
    pack(source, Path(folder, "store"), PackOptions(jobs=1))
    with Loader(Path(folder, "store"), 64, order="shuffled", seed=1) as loader:
        model = Gpt().to(loader.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for batch in loader:  # batch["series"] is (64, 65), uint8, and already on the device
            tokens = batch["series"].long()  # one more than the model sees: its targets
            logits = model(tokens[:, :-1]).transpose(1, 2)
            nn.functional.cross_entropy(logits, tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
        print(loader.reason, len(loader), "batches trained")
