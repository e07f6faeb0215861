"""Entries of pooled embeddings on their way to the samples' ranks, and their gradients on the way back.

Forward takes two collectives: how much comes from whom, then one message for each rank: which entries (``bitmap.py``)
and their values. Backward takes one, of values only: both ends know from the forward pass which entries they are of,
and so how many.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torchrec.distributed.comm_ops import get_gradient_division

from sparse2d.compression.bitmap import (
    BLOCK,
    blocks,
    pack_bits,
    pad_chunks,
    squeeze,
    unpack_bits,
    unpad_chunks,
    unsqueeze,
)
from sparse2d.wire import LookupPart, sending


class Meter:
    """Seconds spent compressing, on the host's clock, and entries that were sent of those there were."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.sent = 0
        self.entries = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the time of the block."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start


class MaskedExchange:
    """One batch of entries, sent and perhaps answered by their gradients. Sending begins at once.

    What a rank keeps for itself is masked and rounded as what it sends: a sample's result depends on no layout.

    Args:
        group: ranks that exchange.
        values: one chunk for each rank of the group, one after the other, fp32 [n].
        mask: which entries are sent, bool [n].
        out_lengths: of the chunks for each rank.
        in_lengths: of the chunks from each rank.
        dtype: what values and gradients are rounded to.
        meter: counts.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        values: Tensor,
        mask: Tensor,
        out_lengths: Sequence[int],
        in_lengths: Sequence[int],
        dtype: torch.dtype,
        meter: Meter,
    ) -> None:
        self.group = group
        self._mask = mask
        self._out_lengths, self._in_lengths = list(out_lengths), list(in_lengths)
        self._dtype = dtype
        self._meter = meter
        with meter.running():
            self._encode(values)
        self._in_sizes = torch.empty_like(self._out_sizes)
        with sending(LookupPart.sizes):
            self._announced = dist.all_to_all_single(self._in_sizes, self._out_sizes, group=group, async_op=True)

    def _encode(self, values: Tensor) -> None:
        """Flags, bytes and values of all chunks, and for each rank how many bytes and values are its own."""
        packed = pack_bits(pad_chunks(self._mask, self._out_lengths))
        self._flags, self._bytes = squeeze(packed)
        self._values = _as_bytes(values.masked_select(self._mask), self._dtype)
        chunks = packed.split([blocks(length) * (BLOCK // 8) for length in self._out_lengths])
        num_bytes = torch.stack([chunk.count_nonzero() for chunk in chunks])
        num_values = torch.stack([chunk.count_nonzero() for chunk in self._mask.split(self._out_lengths)])
        self._out_sizes = torch.stack([num_bytes, num_values], dim=1).int()

    def arrive(self) -> Tensor:
        """What came from each rank, one after the other, fp32; zero where nothing was sent."""
        assert self._announced is not None
        self._announced.wait()
        # One wait for the device, not two.
        out_sizes, in_sizes = torch.stack([self._out_sizes, self._in_sizes]).tolist()
        out_parts, in_parts = self._parts(self._out_lengths, out_sizes), self._parts(self._in_lengths, in_sizes)
        self._out_bytes, self._in_bytes = ([values for *_, values in parts] for parts in (out_parts, in_parts))
        self._meter.sent += sum(num_values for _, num_values in out_sizes)
        self._meter.entries += len(self._mask)
        with self._meter.running():
            message = self._message(out_parts)
        received = message.new_empty(sum(map(sum, in_parts)))
        with sending(LookupPart.embeddings):
            dist.all_to_all_single(
                received, message, list(map(sum, in_parts)), list(map(sum, out_parts)), group=self.group
            )
        with self._meter.running():
            return self._decode(received, in_parts)

    def _parts(self, lengths: Sequence[int], sizes: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
        """For each rank, bytes of flags, of what is not zero in the mask, and of values."""
        item = self._dtype.itemsize
        return [
            (blocks(length), num_bytes, num_values * item)
            for length, (num_bytes, num_values) in zip(lengths, sizes, strict=True)
        ]

    def _message(self, parts: Sequence[tuple[int, int, int]]) -> Tensor:
        """All ranks' messages, one after the other."""
        streams = (self._flags, self._bytes, self._values)
        splits = (list(sizes) for sizes in zip(*parts, strict=True))
        by_stream = [stream.split(sizes) for stream, sizes in zip(streams, splits, strict=True)]
        del self._flags, self._bytes, self._values
        return torch.cat([piece for of_rank in zip(*by_stream, strict=True) for piece in of_rank])

    def _decode(self, received: Tensor, parts: Sequence[tuple[int, int, int]]) -> Tensor:
        pieces = received.split([size for of_rank in parts for size in of_rank])
        flags, kept, values = (torch.cat(pieces[stream::3]) for stream in range(3))
        self._in_mask = unpad_chunks(unpack_bits(unsqueeze(flags, kept)), self._in_lengths)
        return self._placed(values, self._in_mask)

    def _placed(self, values: Tensor, mask: Tensor) -> Tensor:
        dense = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        return dense.masked_scatter_(mask, values.view(self._dtype).float())

    def answer(self, gradient: Tensor) -> Tensor:
        """Gradients of this rank's own entries, fp32 [n]; zero of those that were not sent.

        Args:
            gradient: of what ``arrive`` returned; only those of entries that came travel back.
        """
        with self._meter.running():
            values = _as_bytes(gradient.masked_select(self._in_mask), self._dtype)
        received = values.new_empty(sum(self._out_bytes))
        with sending(LookupPart.gradients):
            dist.all_to_all_single(received, values, self._out_bytes, self._in_bytes, group=self.group)
        with self._meter.running():
            return self._placed(received, self._mask)


def _as_bytes(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).view(torch.uint8)


class Exchanged(Function):
    """The end of an exchange as an operation with a gradient."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, exchange: MaskedExchange) -> Tensor:
        """What came from each rank, one after the other.

        Args:
            ctx: autograd's.
            embeddings: that the exchange was made of, of any shape.
            exchange: under way.
        """
        ctx.exchange, ctx.shape = exchange, embeddings.shape
        return exchange.arrive()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient of the embeddings, divided as TorchRec's own distributions divide it."""
        answer = ctx.exchange.answer(gradient)
        if get_gradient_division():
            answer.div_(ctx.exchange.group.size())
        return answer.view(ctx.shape), None
