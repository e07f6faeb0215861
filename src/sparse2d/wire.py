"""Bytes that this rank sends in collectives, counted where c10d dispatches them.

Every collective passes torch's dispatcher as an operator of c10d: TorchRec's, ours, and those of
DistributedDataParallel's reducer, which calls its group from C++ and which no wrapper in Python would see. Payloads are
what the operators are called with; what of them goes on the wire follows from the algorithm, and a test holds it to the
counters of a network interface. Left out are the headers of TCP and IP, and the few bytes that set up a group.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sparse2d.mesh import DENSE, HELPER


class Purpose(Enum):
    """What a collective is for."""

    lookup = "lookup"
    averaging = "averaging"
    dense = "dense"


class LookupPart(Enum):
    """What of a lookup a collective carries: ids, pooled embeddings, how many of them there are, their gradients."""

    ids = "ids"
    sizes = "sizes"
    embeddings = "embeddings"
    gradients = "gradients"


_sent_part: ContextVar[LookupPart | None] = ContextVar("sent_part", default=None)


@contextmanager
def sending(part: LookupPart) -> Iterator[None]:
    """Say what the collectives of the block carry, where that does not show."""
    token = _sent_part.set(part)
    try:
        yield
    finally:
        _sent_part.reset(token)


class Kind(NamedTuple):
    """Collectives that are counted together."""

    purpose: Purpose
    # Of lookups.
    part: LookupPart | None
    collective: str
    dtype: str


class Call(NamedTuple):
    """One collective as its operator was called."""

    group: dist.ProcessGroup
    # By name, as in the operator's schema.
    arguments: dict[str, Any]

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return int(self.group.size())

    def elements(self, name: str) -> int:
        """Elements of all tensors of one argument."""
        return sum(tensor.numel() for tensor in _tensors(self.arguments[name]))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _all_reduce(call: Call) -> float:
    """A ring reduces and then gathers parts of 1/n each, n - 1 times."""
    return 2 * (call.size - 1) / call.size * call.elements("tensors")


def _all_gather(name: str) -> Callable[[Call], float]:
    """A ring passes each rank's part on n - 1 times."""
    return lambda call: (call.size - 1) * call.elements(name)


def _reduce_scatter(name: str) -> Callable[[Call], float]:
    """A ring passes on parts of 1/n, n - 1 times; gloo all-reduces everything and keeps a part."""

    def sent(call: Call) -> float:
        on_gloo = next(_tensors(call.arguments[name])).device.type == "cpu"
        return (2 if on_gloo else 1) * (call.size - 1) / call.size * call.elements(name)

    return sent


def _all_to_all_single(call: Call) -> float:
    """Every rank sends to each other one what is theirs, and keeps its own part."""
    tensor, splits = call.arguments["input"], call.arguments["input_split_sizes"]
    if not splits:
        return float(tensor.numel()) * (call.size - 1) / call.size
    row = math.prod(tensor.shape[1:])
    return float(tensor.numel() - splits[call.group.rank()] * row)


def _all_to_all(call: Call) -> float:
    return float(call.elements("input_tensors") - call.arguments["input_tensors"][call.group.rank()].numel())


# Elements that a rank sends, for each operator of c10d that training uses.
SENT_ELEMENTS: dict[str, Callable[[Call], float]] = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce,
    "allgather_": _all_gather("input_tensors"),
    "_allgather_base_": _all_gather("input_tensor"),
    "allgather_into_tensor_coalesced_": _all_gather("inputs"),
    "reduce_scatter_": _reduce_scatter("input_tensors"),
    "_reduce_scatter_base_": _reduce_scatter("input_tensor"),
    "reduce_scatter_tensor_coalesced_": _reduce_scatter("inputs"),
    "alltoall_base_": _all_to_all_single,
    "alltoall_": _all_to_all,
}
ALL_REDUCES = ("allreduce_", "allreduce_coalesced_")


class WireCounter:
    """Counts what this rank sends while ``counting``; use it as a context, which hooks c10d's operators.

    A hook costs some 30 microseconds a collective (measured). Collectives of ``mesh.helper_group`` are not counted.
    """

    def __init__(self) -> None:
        self.sent_bytes: Counter[Kind] = Counter()
        self.calls: Counter[Kind] = Counter()
        # Bytes of the dense part in each block of ``counting``, a step: with compression no two need be alike.
        self.dense_bytes: list[float] = []
        self._counts = False
        self._averages = False

    def __enter__(self) -> "WireCounter":
        self._library = torch.library.Library("c10d", "IMPL")
        for name, sent in SENT_ELEMENTS.items():
            operator = getattr(torch.ops.c10d, name).default
            # The dispatcher comes to these keys before the backends' own kernels, in backward passes too.
            for key in ("AutogradCPU", "AutogradCUDA"):
                self._library.impl(name, self._hook(operator, name, sent), key, with_keyset=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._library._destroy()

    def _hook(self, operator: Any, name: str, sent: Callable[[Call], float]) -> Callable[..., Any]:
        names = [argument.name for argument in operator._schema.arguments]
        below = torch._C._after_autograd_keyset

        def kernel(keys: Any, *values: Any) -> Any:
            if self._counts:
                arguments = dict(zip(names, values, strict=False))
                self._count(Call(dist.ProcessGroup.unbox(arguments["process_group"]), arguments), name, sent)
            return operator.redispatch(keys & below, *values)

        return kernel

    def _count(self, call: Call, name: str, sent: Callable[[Call], float]) -> None:
        if call.group.group_desc == HELPER:
            return
        tensor = next(_tensors(list(call.arguments.values())))
        purpose = self._purpose(call, name)
        part = _part(tensor) if purpose is Purpose.lookup else None
        kind = Kind(purpose, part, name.strip("_"), str(tensor.dtype).removeprefix("torch."))
        self.calls[kind] += 1
        self.sent_bytes[kind] += sent(call) * tensor.element_size()

    def _purpose(self, call: Call, name: str) -> Purpose:
        """Groups cannot tell: lookups of full MP and averaging with N = 1 go around all ranks, like dense gradients.

        Compressed ones alone have a group of their own.
        """
        if call.group.group_desc == DENSE:
            return Purpose.dense
        if self._averages:
            return Purpose.averaging
        # Outside of averaging, only the dense part is all-reduced.
        return Purpose.dense if name in ALL_REDUCES else Purpose.lookup

    def averaging(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, whose collectives average replicas."""

        def averages(*args: Any, **kwargs: Any) -> Any:
            self._averages = True
            try:
                return call(*args, **kwargs)
            finally:
                self._averages = False

        return averages

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count during the block."""
        self._counts = True
        before = self._dense_total()
        try:
            yield
        finally:
            self._counts = False
            self.dense_bytes.append(self._dense_total() - before)

    def _dense_total(self) -> float:
        return sum(sent for kind, sent in self.sent_bytes.items() if kind.purpose is Purpose.dense)


def _part(tensor: Tensor) -> LookupPart:
    """What of a lookup a tensor is: what its sender says, or what its type and the running backward pass tell."""
    if (said := _sent_part.get()) is not None:
        return said
    if torch._C._current_graph_task_id() >= 0:
        return LookupPart.gradients
    # TorchRec's codecs make bytes of embeddings; ids and their lengths are integers of other sizes.
    is_pooled = tensor.is_floating_point() or tensor.dtype == torch.uint8
    return LookupPart.embeddings if is_pooled else LookupPart.ids


def wire_record(counter: WireCounter, steps: int, averagings: int) -> dict[str, Any]:
    """Mean and maximum over the ranks of what each has sent; a collective over all ranks.

    Args:
        counter: of this rank.
        steps: that it counted.
        averagings: among them, the same on all ranks.
    """
    ranks: list[Any] = [None] * dist.get_world_size()
    middle = statistics.median(counter.dense_bytes[:steps]) if steps else 0.0
    dist.all_gather_object(ranks, (counter.sent_bytes, counter.calls, middle))
    sent, calls, middles = zip(*ranks, strict=True)

    def total(purpose: Purpose, per: int) -> dict[str, float]:
        return mean_and_max([sum(n for kind, n in of.items() if kind.purpose is purpose) / max(per, 1) for of in sent])

    def of_part(part: LookupPart) -> dict[str, float]:
        return mean_and_max([sum(n for kind, n in of.items() if kind.part is part) / max(steps, 1) for of in sent])

    kinds = sorted({kind for of in sent for kind in of}, key=str)
    return {
        "lookup_bytes_per_step": total(Purpose.lookup, steps),
        "lookup_parts_bytes_per_step": {part.name: of_part(part) for part in LookupPart},
        "sync_bytes_per_sync": total(Purpose.averaging, averagings),
        "dense_bytes_per_step": total(Purpose.dense, steps),
        # Of a step in the middle: the mean has a warm-up's steps in it, too.
        "dense_bytes_p50": mean_and_max(list(middles)),
        "collectives": [
            {
                "purpose": kind.purpose.name,
                "part": None if kind.part is None else kind.part.name,
                "collective": kind.collective,
                "dtype": kind.dtype,
                "calls_per_step": mean_and_max([of[kind] / max(steps, 1) for of in calls]),
                "sent_bytes_per_step": mean_and_max([of[kind] / max(steps, 1) for of in sent]),
            }
            for kind in kinds
        ],
    }


def mean_and_max(values: list[float]) -> dict[str, float]:
    """Of one number of each rank."""
    return {"mean": sum(values) / len(values), "max": max(values)}
