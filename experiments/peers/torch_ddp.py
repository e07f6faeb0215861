"""DLRM without TorchRec: ``nn.EmbeddingBag`` with sparse gradients, every table on every rank, all of it in DDP.

torchrun --nproc-per-node 2 torch_ddp.py --data ... (see bench.py)
"""

import logging

import torch
import torch.distributed as dist
from common import Clock, arguments, batches
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def mlp(inputs: int, sizes: list[int], *, last_is_linear: bool) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for width, size in zip([inputs, *sizes], sizes, strict=False):
        layers += [nn.Linear(width, size), nn.ReLU()]
    return nn.Sequential(*(layers[:-1] if last_is_linear else layers))


class Dlrm(nn.Module):
    """DLRM (arXiv 1906.00091) with its loss."""

    def __init__(self, table_rows: list[int], dim: int, dense_arch: list[int], over_arch: list[int]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum", sparse=True) for rows in table_rows)
        self.dense_arch = mlp(13, dense_arch, last_is_linear=False)
        features = len(table_rows) + 1
        self.over_arch = mlp(dim + features * (features - 1) // 2, over_arch, last_is_linear=True)
        self.register_buffer("pairs", torch.triu_indices(features, features, offset=1))

    def forward(self, dense: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of dense values [b, 13], ids [26, b] and labels [b]."""
        embedded = self.dense_arch(dense)
        pooled = [table(column.view(-1, 1)) for table, column in zip(self.tables, ids, strict=True)]
        stacked = torch.stack([embedded, *pooled], dim=1)
        dots = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits = self.over_arch(torch.cat([embedded, dots], dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def main() -> None:
    """Train for some steps and write what a step took."""
    given = arguments(__doc__)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = Dlrm(given.table_rows, given.dim, given.dense_arch, given.over_arch)
    tables = list(model.tables.parameters())
    dense = [*model.dense_arch.parameters(), *model.over_arch.parameters()]
    ddp = DistributedDataParallel(model)
    # Torch has no row-wise AdaGrad for sparse gradients.
    optimizers = [torch.optim.Adagrad(tables, lr=0.02, eps=1e-8), torch.optim.Adam(dense, lr=1e-3, eps=1e-8)]
    clock = Clock()
    clock.watch(ddp)
    for batch in batches(given, rank, world_size):
        for optimizer in optimizers:
            optimizer.zero_grad()
        ddp(*batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    clock.write()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
