"""Keep your DataLoader: one line gives it pinned staging and copies behind the step."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import stoker

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
data = TensorDataset(torch.randn(2000, 32), torch.randint(0, 4, (2000,)))
plain = DataLoader(data, batch_size=100, shuffle=True)  # yours, unchanged

model = torch.nn.Linear(32, 4).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = stoker.prefetch(plain, device)
for epoch in range(2):
    for features, labels in batches:  # already on the device: no .to(device) here
        loss = torch.nn.functional.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(
        f"epoch {epoch}: {len(batches)} batches on {features.device}, last loss {loss.item():.3f}"
    )
