"""Two ranks, and the second has three times the work. Remedy: both have the same."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from loop import arguments, small_model, train
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def run(rank, port, remedied, steps):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    seconds = 0.012 if remedied else (0.006, 0.018)[rank]
    data = TensorDataset(torch.randn(4096, 64), torch.randn(4096))
    model = DistributedDataParallel(small_model(64, seconds))
    train(DataLoader(data, batch_size=64), model, steps)
    dist.barrier()
    # Taking the process group apart can wait for ever for its own threads.
    os._exit(0)


if __name__ == "__main__":
    chosen = arguments()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(run, (port, chosen.remedied, chosen.steps), 2, start_method="fork")
