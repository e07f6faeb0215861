"""What the tests of compressed gradients run on real ranks."""

import logging
import pickle
from dataclasses import dataclass, field
from logging.handlers import BufferingHandler

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparse2d.compression.dense import DctDp, compress_dense
from sparse2d.config import DenseCompressionConfig, DenseMethod
from sparse2d.mesh import dense_group, process_group

CPU = torch.device("cpu")


@dataclass(frozen=True)
class HookRun:
    """Steps of a small module under one compression.

    ``restart_at``: after this step go on with a new module and hook that are given the old ones' state. ``poison``:
    step at which rank 1 has a NaN in its input. ``alike``: all ranks have the same rows but for a little noise.
    """

    config: DenseCompressionConfig
    steps: int = 12
    bucket_kb: float = 0.5
    static_graph: bool = True
    restart_at: int | None = None
    poison: int | None = None
    alike: bool = False


@dataclass
class HookSteps:
    """One rank's steps, each a flat tensor over all parameters: raw gradient, what left it, residual, and the mean."""

    gradients: list[Tensor] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)
    residuals: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)
    thresholds_found: int = 0
    warnings: list[str] = field(default_factory=list)


class Net(nn.Module):
    """Parameters of 1 to 240 elements, one of which gets equal gradients and one none but zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 6), nn.Tanh(), nn.Linear(6, 1))
        self.equal = nn.Parameter(torch.zeros(17))
        self.unused = nn.Parameter(torch.ones(9))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean() + self.equal.sum() + (self.unused * 0).sum()


def hooked_steps(runs: list[HookRun]) -> list[list[HookSteps]]:
    """For each run the steps of all ranks."""
    torch.set_num_threads(1)
    with process_group(CPU) as rank:
        group, results = dense_group(), []
        for run in runs:
            everyone: list = [None] * rank.world_size
            dist.all_gather_object(everyone, _hooked_steps(run, group, rank.rank))
            results.append(everyone)
        return results


def _hooked_steps(run: HookRun, group, rank: int) -> HookSteps:
    done = HookSteps()
    warned = BufferingHandler(capacity=1000)
    logging.disable(logging.INFO)
    logging.getLogger("sparse2d.compression").addHandler(warned)
    module, compressor = _hooked(run, group)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
    inputs, noise = torch.Generator().manual_seed(0 if run.alike else rank), torch.Generator().manual_seed(rank)
    for step in range(1, run.steps + 1):
        x = torch.randn(5, 12, generator=inputs) + 1e-3 * torch.randn(5, 12, generator=noise)
        if run.poison == step and rank == 1:
            x[0, 0] = torch.nan
        if isinstance(compressor, DctDp):
            _record(compressor, done)
        if compressor is not None:
            compressor.begin_step(step)
        optimizer.zero_grad()
        module(x).backward()
        done.means.append(_flat([param.grad for param in module.parameters()]))
        if isinstance(compressor, DctDp):
            done.residuals.append(compressor.feedback.flat.clone())
            done.collectives.append(next(kind.name for kind, n in compressor.collectives.items() if n))
            done.thresholds_found = compressor.feedback.num_found
            compressor.collectives.clear()
        optimizer.step()
        if step == run.restart_at:
            saved = pickle.loads(pickle.dumps((module.state_dict(), compressor.state_dict())))
            module, compressor = _hooked(run, group)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
            for _ in range(2):  # as Engine.rehearse
                compressor.begin_step(1)
                module(torch.ones(5, 12)).backward()
            module.load_state_dict(saved[0])
            compressor.load_state_dict(saved[1])
    done.warnings = [record.getMessage() for record in warned.buffer]
    done.sizes = [param.numel() for param in module.parameters()]
    return done


def _hooked(run: HookRun, group):
    module = DistributedDataParallel(
        Net(), bucket_cap_mb=run.bucket_kb / 1024, static_graph=run.static_graph, gradient_as_bucket_view=True
    )
    method = run.config.method
    return module, None if method is DenseMethod.none else compress_dense(module, run.config, group)


def _record(compressor: DctDp, done: HookSteps) -> None:
    """Have the next backward pass leave the raw gradient and what is sent of it and of the old residual."""
    feedback, gradient = compressor.feedback, {}
    # Fresh wrappers in each step, around the real ones.
    add, mean = type(feedback).add, type(compressor.exchange).mean

    def spy_add(name: str, value: Tensor) -> None:
        gradient[name] = value.clone()
        add(feedback, name, value)

    def spy_mean(entries, everything: Tensor, chooses: bool):
        accumulated = everything.clone()
        result = mean(compressor.exchange, entries, everything, chooses)
        sent = torch.zeros_like(accumulated)
        sent[entries.indices] = entries.decoded()
        done.sent.append(accumulated if result.collective.name == "dense" else sent)
        done.gradients.append(_flat([gradient[name] for name in compressor._names.values()]))
        return result

    feedback.add, compressor.exchange.mean = spy_add, spy_mean


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
