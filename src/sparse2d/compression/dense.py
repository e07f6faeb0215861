"""Gradients of the dense part through a communication hook of ``DistributedDataParallel``: DCT-DP, and torch's own."""

import logging
import queue
import threading
import time
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from sparse2d.compression.compressor import Compressor, compress_times
from sparse2d.compression.error_feedback import Entries, ErrorFeedback
from sparse2d.compression.exchange import Collective, SparseMean
from sparse2d.compression.threshold import anew_each_time
from sparse2d.config import DenseCompressionConfig, DenseMethod

log = logging.getLogger(__name__)

# DDP deals its buckets anew after the first backward passes, and PowerSGD's state is by bucket.
POWERSGD_FIRST_STEP = 3


class Bucket(NamedTuple):
    """A bucket whose mean is still to come: its buffer, views of it for each parameter, and DDP's future."""

    buffer: Tensor
    views: dict[str, Tensor]
    future: Future[Tensor]


def _reduced_parameters(module: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Parameters whose gradients DDP averages."""
    return {
        name: param
        for name, param in module.module.named_parameters()
        if param.requires_grad and name not in module.parameters_to_ignore
    }


def plain_bytes(module: DistributedDataParallel, group: dist.ProcessGroup) -> float:
    """What a rank sends a step without compression: a ring's all-reduce of fp32 gradients."""
    elements = sum(param.numel() for param in _reduced_parameters(module).values())
    size = int(group.size())
    return float(2 * (size - 1) / size * elements * torch.float32.itemsize)


class DctDp:
    """DCT-DP (arXiv 2010.08899; formula: ``reference.dct_dp``) on the gradients of one DDP module.

    Residuals, thresholds and what is sent are by parameter, in the module's order, and so do not depend on the buckets
    that DDP deals and deals again. All buckets of a backward pass make one exchange, which a thread of its own waits
    for: the backward pass goes on, and a rank that waits in it for lookups cannot hold up one that waits for gradients.

    Args:
        module: whose gradients; it must not have run yet.
        config: density, L, scope, warm-up and what is sent.
        group: all ranks of the module, for nothing else.
    """

    def __init__(self, module: DistributedDataParallel, config: DenseCompressionConfig, group: Any) -> None:
        named = _reduced_parameters(module)
        self._plain_bytes = plain_bytes(module, group)
        self._names = {param: name for name, param in named.items()}
        device = next(iter(named.values())).device
        self.feedback = ErrorFeedback(
            {name: param.numel() for name, param in named.items()}, config, config.scope, device
        )
        self.exchange = SparseMean(self.feedback.flat.numel(), config.value_dtype, group, device)
        self._sizes = [param.numel() for param in named.values()]
        self._step = 0
        self._buckets: list[Bucket] = []
        self._busy_s = 0.0
        self.compress_s: list[float] = []
        self.num_sent: list[int] = []
        self.collectives: Counter[Collective] = Counter()
        self._warned = False
        self._jobs: queue.SimpleQueue[tuple[list[Bucket], Entries, bool]] = queue.SimpleQueue()
        # A daemon: nobody waits at exit for an exchange with a rank that is gone.
        threading.Thread(target=self._work, name="dct-dp", daemon=True).start()
        module.register_comm_hook(self, DctDp._hook)

    def begin_step(self, step: int) -> None:
        """Call before the forward pass of a 1-based step."""
        self._step = step

    def _hook(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """DDP's hook: take in a bucket; the last one of a backward pass begins the exchange."""
        start = time.perf_counter()
        names = [self._names[param] for param in bucket.parameters()]
        device = bucket.buffer().device
        future: Future[Tensor] = Future(devices=[device] if device.type == "cuda" else None)
        views = dict(zip(names, bucket.gradients(), strict=True))
        self._buckets.append(Bucket(bucket.buffer(), views, future))
        for name, gradient in views.items():
            self.feedback.add(name, gradient)
        if bucket.is_last():
            buckets, self._buckets = self._buckets, []
            chooses = self.feedback.finds_threshold(self._step)
            entries = self.feedback.entries(self.feedback.select(self._step))
            self._jobs.put((buckets, entries, chooses))
        self._busy_s += time.perf_counter() - start
        return future

    def _report_non_finite(self, mean: Tensor, means: dict[str, Tensor]) -> None:
        """Of whatever rank: the mean of all shows it to each of them, and so to rank 0, which tells."""
        # Once over everything, in each step; by parameter only where there is something to tell.
        if self._warned or bool(mean.isfinite().all()):
            return
        self._warned = True
        name = next(name for name, part in means.items() if not bool(part.isfinite().all()))
        log.warning("step %d: the gradient of %s is not finite on some rank", self._step, name)

    def _work(self) -> None:
        while True:
            buckets, entries, chooses = self._jobs.get()
            try:
                self._exchange(buckets, entries, chooses)
            except Exception as error:
                for bucket in buckets:
                    bucket.future.set_exception(error)

    @torch.no_grad()
    def _exchange(self, buckets: list[Bucket], entries: Entries, chooses: bool) -> None:
        collective, parts, mean = self.exchange.mean(entries, self.feedback.flat, chooses)
        start = time.perf_counter()
        if mean is not None:
            self.feedback.take_all()
        else:
            self.feedback.take(entries)
            mean = torch.zeros_like(self.feedback.flat)
            for indices, values in parts:
                # One rank's indices differ, so that nothing depends on an order that a GPU may choose.
                mean[indices] += values
        self.collectives[collective] += 1
        self.num_sent.append(self.feedback.flat.numel() if collective is Collective.dense else len(entries.indices))
        means = dict(zip(self._names.values(), mean.split(self._sizes), strict=True))
        self._report_non_finite(mean, means)
        for bucket in buckets:
            for name, view in bucket.views.items():
                view.copy_(means[name].view_as(view))
        self.compress_s.append(self._busy_s + time.perf_counter() - start)
        self._busy_s = 0.0
        for bucket in buckets:
            bucket.future.set_result(bucket.buffer)

    def state_dict(self) -> dict[str, Any]:
        """Residuals, thresholds, and which collective was chosen."""
        return {"feedback": self.feedback.state_dict(), "sparse": self.exchange.sparse.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict`` of the same rank."""
        self.feedback.load_state_dict(state["feedback"])
        self.exchange.sparse = Collective[state["sparse"]]

    def record(self) -> dict[str, float]:
        """Compression time of a step (all but waiting for others), entries sent, thresholds found, collectives used."""
        steps = max(len(self.compress_s), 1)
        return {
            **compress_times(self.compress_s),
            "plain_bytes": self._plain_bytes,
            "sent_share": sum(self.num_sent) / steps / self.feedback.flat.numel(),
            "thresholds_found": self.feedback.num_found,
            **{f"steps_{kind.name}": self.collectives[kind] for kind in Collective},
        }


def _bf16_hook(group: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """Torch's, which DDP refuses by its name without NCCL though gloo sums bf16, too."""
    return default_hooks.bf16_compress_hook(group, bucket)


class TorchHook:
    """A hook that torch ships, unchanged: its all-reduce, bf16, fp16, or PowerSGD (arXiv 1905.13727)."""

    def __init__(self, module: DistributedDataParallel, config: DenseCompressionConfig, group: Any) -> None:
        self._plain_bytes = plain_bytes(module, group)
        self._power: powerSGD_hook.PowerSGDState | None = None
        if config.method is DenseMethod.powersgd:
            self._power = powerSGD_hook.PowerSGDState(
                process_group=group,
                matrix_approximation_rank=config.rank,
                start_powerSGD_iter=max(config.warmup_steps, POWERSGD_FIRST_STEP),
            )
            module.register_comm_hook(self._power, powerSGD_hook.powerSGD_hook)
            return
        hooks = {
            DenseMethod.allreduce: default_hooks.allreduce_hook,
            DenseMethod.bf16: _bf16_hook,
            DenseMethod.fp16: default_hooks.fp16_compress_hook,
        }
        module.register_comm_hook(group, hooks[config.method])

    def begin_step(self, step: int) -> None:
        """Torch's hooks count for themselves."""

    def state_dict(self) -> dict[str, Any]:
        """PowerSGD's errors and factors of each bucket, and its counters."""
        if self._power is None:
            return {}
        kind, keys, position, has_gauss, gauss = self._power.rng.get_state(legacy=True)
        assert kind == "MT19937"
        return {
            "iter": self._power.iter,
            "rng": [keys.tolist(), position, has_gauss, gauss],
            **{name: {str(i): t.clone() for i, t in getattr(self._power, name).items()} for name in _POWER_TENSORS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict`` of the same rank."""
        if self._power is None:
            return
        self._power.iter = state["iter"]
        keys, position, has_gauss, gauss = state["rng"]
        self._power.rng.set_state(("MT19937", keys, position, has_gauss, gauss))
        for name in _POWER_TENSORS:
            setattr(self._power, name, {int(i): tensor for i, tensor in state[name].items()})

    def record(self) -> dict[str, float]:
        """Nothing is measured inside torch's hooks."""
        return {"plain_bytes": self._plain_bytes}


_POWER_TENSORS = ("error_dict", "p_memory_dict", "q_memory_dict")


def compress_dense(
    module: torch.nn.Module, config: DenseCompressionConfig, group: dist.ProcessGroup
) -> Compressor | None:
    """Hook the DDP module of a sharded model's dense part, if it has one, on all ranks alike.

    Args:
        module: the model's part that DDP wraps.
        config: how.
        group: all ranks, for nothing else.
    """
    if not isinstance(module, DistributedDataParallel):
        return None
    if config.method is DenseMethod.dct:
        return DctDp(module, config, group)
    if config.method is DenseMethod.topk:
        return DctDp(module, anew_each_time(config), group)
    return TorchHook(module, config, group)
