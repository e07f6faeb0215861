"""Where a step's time goes: every moment of it is charged to one phase, watched from outside of what is timed.

A rank that waits in a collective for a slower rank is charged for the wait, there. What runs beside something else, as
the all-reduce of dense gradients beside the backward pass, is charged only for what the step waits for.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.variable import Variable
from torchrec.distributed import comm_ops
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import NoWait

from sparse2d.compression.masked_exchange import Exchanged, Meter
from sparse2d.engine import Engine
from sparse2d.parallel.tables import lookup_kernels
from sparse2d.pipeline import TrainSteps


class Phase(Enum):
    """Parts of a step; ``dense`` is what is in no other one: forward and backward of the dense part, mostly."""

    data = "data"
    input_distribution = "input_distribution"
    lookup = "lookup"
    # Of pooled embeddings forward and of their gradients backward.
    output_distribution = "output_distribution"
    # Of those: choosing, packing and unpacking what is sent.
    compression = "compression"
    dense = "dense"
    # Backward of the lookup, with the tables' fused optimizer.
    table_update = "table_update"
    # What is left of it when the backward pass is done.
    dense_all_reduce = "dense_all_reduce"
    # Of the dense part.
    optimizer = "optimizer"
    averaging = "averaging"


class PhaseClock:
    """Charges the time of each step to phases; the innermost one that is open is charged.

    Args:
        synchronise: waits for the device, whose kernels may still run when a call returns.
        clock: seconds, monotonic.
    """

    def __init__(
        self, synchronise: Callable[[], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._synchronise = synchronise
        self._clock = clock
        self._open: list[Phase] = []
        self._since = 0.0
        self._step: defaultdict[Phase, float] = defaultdict(float)
        self.steps: list[dict[Phase, float]] = []

    def _charge(self) -> None:
        if self._synchronise is not None:
            self._synchronise()
        now = self._clock()
        if self._open:
            self._step[self._open[-1]] += now - self._since
        self._since = now

    def enter(self, phase: Phase) -> None:
        """Open a phase inside the one that is open."""
        self._charge()
        self._open.append(phase)

    def leave(self) -> None:
        """Close the innermost phase."""
        self._charge()
        self._open.pop()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Open a phase for the time of the block."""
        self.enter(phase)
        yield
        self.leave()

    def unwind(self) -> None:
        """Close all phases that are open inside the step."""
        self._charge()
        del self._open[1:]

    @property
    def in_step(self) -> bool:
        """Whether a step is timed."""
        return bool(self._open)

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step: seconds of its phases are the next entry of ``steps``."""
        self._step = defaultdict(float)
        self.enter(Phase.dense)
        yield
        self.unwind()
        self._open.clear()
        self.steps.append({phase: self._step[phase] for phase in Phase})

    def charged(self, phase: Phase, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, charged to a phase."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                return call(*args, **kwargs)

        return timed


@contextmanager
def watching(engine: Engine, train_steps: TrainSteps, clock: PhaseClock) -> Iterator[None]:
    """Have the phases of training steps charged; without TorchRec's pipeline, in which phases overlap.

    What a step waits for is waited for where it is begun, which changes no result.
    """
    train_steps.draw = clock.charged(Phase.data, train_steps.draw)  # type: ignore[method-assign]
    engine.optimizer.step = _after_backward(clock, clock.charged(Phase.optimizer, engine.optimizer.step))
    if engine.averager is not None:
        engine.averager.after_step = clock.charged(Phase.averaging, engine.averager.after_step)  # type: ignore[method-assign]
    for module in engine.model.modules():
        if isinstance(module, ShardedEmbeddingBagCollection):
            _watch_collection(module, clock)
    for kernel in lookup_kernels(engine.model):
        kernel.emb_module.register_forward_hook(_watch_update(clock))
    engine.model.register_forward_hook(_watch_end_of_backward(clock))
    with _charging(clock):
        yield


def _watch_collection(module: ShardedEmbeddingBagCollection, clock: PhaseClock) -> None:
    input_dist, compute_and_output_dist = module.input_dist, module.compute_and_output_dist

    def timed_input_dist(*args: Any, **kwargs: Any) -> Any:
        with clock.phase(Phase.input_distribution):
            return NoWait(NoWait(input_dist(*args, **kwargs).wait().wait()))

    def timed_output_dist(*args: Any, **kwargs: Any) -> Any:
        with clock.phase(Phase.output_distribution):
            return compute_and_output_dist(*args, **kwargs).wait()

    module.input_dist, module.compute_and_output_dist = timed_input_dist, timed_output_dist
    for lookup in module._lookups:
        lookup.register_forward_pre_hook(lambda *_: clock.enter(Phase.lookup))
        lookup.register_forward_hook(lambda *_: clock.leave())


def _watch_update(clock: PhaseClock) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: Any, pooled: torch.Tensor) -> None:
        node = pooled.grad_fn
        if node is not None and clock.in_step:
            node.register_prehook(lambda _: clock.enter(Phase.table_update))
            node.register_hook(lambda *_: clock.leave())

    return hook


def _watch_end_of_backward(clock: PhaseClock) -> Callable[..., None]:
    """DistributedDataParallel waits for its reductions in a callback at the end; ours is queued before it."""

    def hook(_module: nn.Module, _args: Any, output: tuple[torch.Tensor, Any]) -> None:
        loss = output[0]
        if loss.requires_grad and clock.in_step:
            queue = Variable._execution_engine.queue_callback
            loss.register_hook(lambda _: queue(lambda: clock.enter(Phase.dense_all_reduce)))

    return hook


def _after_backward(clock: PhaseClock, optimizer_step: Callable[..., Any]) -> Callable[..., Any]:
    def step(*args: Any, **kwargs: Any) -> Any:
        clock.unwind()
        return optimizer_step(*args, **kwargs)

    return step


@contextmanager
def _charging(clock: PhaseClock) -> Iterator[None]:
    """Charge the backward of collectives, which autograd looks up in their classes, and what compresses lookups."""
    functions: list[Any] = [
        value
        for value in vars(comm_ops).values()
        if isinstance(value, type) and issubclass(value, Function) and value is not Function
    ]
    metered = Meter.running

    @contextmanager
    def running(meter: Meter) -> Iterator[None]:
        with clock.phase(Phase.compression), metered(meter):
            yield

    with ExitStack() as stack:
        for function in (*functions, Exchanged):
            backward = staticmethod(clock.charged(Phase.output_distribution, function.backward))
            stack.enter_context(_replaced(function, "backward", backward))
        stack.enter_context(_replaced(Meter, "running", running))
        yield


@contextmanager
def _replaced(owner: type, name: str, value: Any) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
