"""DCT-MP at the model-parallel boundary: in the place of TorchRec's own collectives, inside its output distributions.

TorchRec's codecs cannot carry it: they see a flat tensor without its tables, their sizes must follow from the shape
alone, and the gradients' codec knows nothing of what was sent forward. So the collective itself is replaced:

- table- and column-wise, and between hosts under ``table_row_wise`` and ``grid_shard``: an all-to-all of the entries
  that reach the threshold of their table, or of the rank's columns of it; collectives inside a host stay as they are;
- row-wise: each rank holds partial sums over its own rows, for all samples and tables. Those are thresholded, sent by
  an all-to-all and added up where they arrive, in the order of ranks; the gradient of a sum goes back to the ranks that
  sent a part of it. At density 1 that is as many entries as a reduce-scatter sends, and half of what gloo's sends.
  The density is of all partial sums: with one id a bag most are zero, and more than that share of the others is sent.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.dist_data import PooledEmbeddingsAllToAll, PooledEmbeddingsReduceScatter
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingDist
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingDist
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingDist
from torchrec.distributed.types import Awaitable

from sparse2d.compression.codecs import PRECISIONS, SUMMED, torchrec_codecs
from sparse2d.compression.compressor import compress_times
from sparse2d.compression.error_feedback import DTYPES
from sparse2d.compression.masked_exchange import Exchanged, MaskedExchange, Meter
from sparse2d.compression.selection import Selection, selection_of
from sparse2d.config import LookupCompressionConfig


class _Arriving(Awaitable[Tensor]):
    """Pooled embeddings under way."""

    def __init__(self, embeddings: Tensor, exchange: MaskedExchange, arrange: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._embeddings = embeddings
        self._exchange = exchange
        self._arrange = arrange

    def _wait_impl(self) -> Tensor:
        return self._arrange(Exchanged.apply(self._embeddings, self._exchange))


class Sender:
    """Begins exchanges of one output distribution's embeddings.

    Args:
        group: ranks that exchange.
        dims: this rank's columns of each table.
        config: which entries are sent, and as what.
    """

    def __init__(self, group: dist.ProcessGroup, dims: Sequence[int], config: LookupCompressionConfig) -> None:
        self.group = group
        self.selection: Selection = selection_of(dims, config)
        self.step = 0
        self.meter = Meter()
        self._dtype = DTYPES[config.value_dtype]

    def batch_sizes(self, embeddings: Tensor, given: Sequence[int] | None) -> list[int]:
        """Samples of each rank: as given, or equal parts."""
        return list(given or [len(embeddings) // self.group.size()] * self.group.size())

    def begin(
        self, embeddings: Tensor, batch: Sequence[int], in_widths: Sequence[int], arrange: Callable[[Tensor], Tensor]
    ) -> Awaitable[Tensor]:
        """Select and begin to send.

        Args:
            embeddings: [samples of all ranks, this rank's columns], rank by rank.
            batch: samples of each rank.
            in_widths: columns that come from each rank for this rank's samples.
            arrange: makes the result of what came, rank by rank.
        """
        # TorchRec does not say whether it trains; only then gradients are asked for.
        trains = torch.is_grad_enabled() and embeddings.requires_grad
        meter = self.meter if trains else Meter()
        pooled = embeddings.detach()
        with meter.running():
            mask = self.selection.mask(pooled, self.step, trains=trains)
        own = batch[self.group.rank()]
        exchange = MaskedExchange(
            self.group,
            pooled.flatten(),
            mask.flatten(),
            [samples * pooled.shape[1] for samples in batch],
            [own * width for width in in_widths],
            self._dtype,
            meter,
        )
        return _Arriving(embeddings, exchange, arrange)


class SelectedAllToAll:
    """``torchrec.distributed.dist_data.PooledEmbeddingsAllToAll``, of selected entries only.

    Args:
        sender: of this rank's columns.
        widths: columns that each rank holds.
        callbacks: applied to the result, as upstream's.
    """

    def __init__(
        self, sender: Sender, widths: Sequence[int], callbacks: Sequence[Callable[[Tensor], Tensor]] | None
    ) -> None:
        self._sender = sender
        self._widths = list(widths)
        self._callbacks = callbacks or ()

    def __call__(self, embeddings: Tensor, batch_size_per_rank: Sequence[int] | None = None) -> Awaitable[Tensor]:
        """Columns of all ranks for this rank's samples, [samples, columns].

        Args:
            embeddings: this rank's columns for all samples of the group, rank by rank.
            batch_size_per_rank: samples of each rank; None = equal parts.
        """
        batch = self._sender.batch_sizes(embeddings, batch_size_per_rank)
        own = batch[self._sender.group.rank()]

        def arrange(arrived: Tensor) -> Tensor:
            parts = arrived.split([own * width for width in self._widths])
            return torch.cat([part.view(own, width) for part, width in zip(parts, self._widths, strict=True)], dim=1)

        result = self._sender.begin(embeddings, batch, self._widths, arrange)
        result.callbacks.extend(self._callbacks)
        return result


class SelectedReduceScatter:
    """``torchrec.distributed.dist_data.PooledEmbeddingsReduceScatter``, of selected entries of the partial sums only.

    Args:
        sender: of this rank's partial sums.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def __call__(self, embeddings: Tensor, input_splits: Sequence[int] | None = None) -> Awaitable[Tensor]:
        """Sums over all ranks for this rank's samples, [samples, columns].

        Args:
            embeddings: this rank's partial sums for all samples of the group, rank by rank.
            input_splits: samples of each rank; None = equal parts.
        """
        batch = self._sender.batch_sizes(embeddings, input_splits)
        own, width = batch[self._sender.group.rank()], embeddings.shape[1]
        shape = (len(batch), own, width)
        return self._sender.begin(embeddings, batch, [width] * len(batch), lambda arrived: arrived.view(shape).sum(0))


class LookupCompression:
    """How the pooled embeddings of a model are sent, and what this rank remembers of it: a ``Compressor``.

    Args:
        model: sharded, before its first step: TorchRec would make its own collectives then.
        config: the method; DCT-MP's and top-k's options.
        device: of this rank.
    """

    def __init__(self, model: nn.Module, config: LookupCompressionConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._senders: list[Sender] = []
        self._compress_s: list[float] = []
        for module in model.modules():
            if isinstance(module, ShardedEmbeddingBagCollection):
                for output in module._output_dists:
                    self._install(output)

    def _install(self, output: nn.Module) -> None:
        if isinstance(output, TwPooledEmbeddingDist):
            output._dist = self._all_to_all(output._pg, output._emb_dim_per_rank_per_feature, output._callbacks)
        elif isinstance(output, RwPooledEmbeddingDist):
            output._dist = self._reduce_scatter(output._pg, output._embedding_dims)
        elif isinstance(output, TwRwPooledEmbeddingDist | GridPooledEmbeddingDist):
            output._intra_dist = PooledEmbeddingsReduceScatter(output._intra_pg)
            callbacks = output._callbacks if isinstance(output, GridPooledEmbeddingDist) else None
            output._cross_dist = self._all_to_all(output._cross_pg, output._emb_dim_per_node_per_feature, callbacks)
        else:
            # Replicated tables send nothing here.
            assert isinstance(output, DpPooledEmbeddingDist), type(output)

    def _all_to_all(
        self,
        group: dist.ProcessGroup,
        dims_per_rank: Sequence[Sequence[int]],
        callbacks: list[Callable[[Tensor], Tensor]] | None,
    ) -> Any:
        widths = [sum(dims) for dims in dims_per_rank]
        if self._config.method in PRECISIONS:
            codecs = torchrec_codecs(PRECISIONS[self._config.method])
            return PooledEmbeddingsAllToAll(group, widths, self._device, callbacks, codecs)
        return SelectedAllToAll(self._sender(group, dims_per_rank[group.rank()]), widths, callbacks)

    def _reduce_scatter(self, group: dist.ProcessGroup, dims: Sequence[int]) -> Any:
        if self._config.method in PRECISIONS:
            return PooledEmbeddingsReduceScatter(group, torchrec_codecs(SUMMED[self._config.method]))
        return SelectedReduceScatter(self._sender(group, dims))

    def _sender(self, group: dist.ProcessGroup, dims: Sequence[int]) -> Sender:
        sender = Sender(group, dims, self._config)
        self._senders.append(sender)
        return sender

    def begin_step(self, step: int) -> None:
        """See ``Compressor``."""
        self._close_step()
        for sender in self._senders:
            sender.step = step

    def _close_step(self) -> None:
        """Note what the last step spent."""
        seconds = sum(sender.meter.seconds for sender in self._senders)
        if seconds > 0:
            self._compress_s.append(seconds)
        for sender in self._senders:
            sender.meter.seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        """See ``Compressor``."""
        return {"selections": [sender.selection.state_dict() for sender in self._senders]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``Compressor``."""
        for sender, selection in zip(self._senders, state["selections"], strict=True):
            sender.selection.load_state_dict(selection, self._device)

    def record(self) -> dict[str, float]:
        """What compressing takes of a step, on the host's clock, what is sent; nothing of TorchRec's codecs."""
        self._close_step()
        if self._config.method in PRECISIONS:
            return {}
        entries = sum(sender.meter.entries for sender in self._senders)
        return {
            **compress_times(self._compress_s),
            "sent_share": sum(sender.meter.sent for sender in self._senders) / max(entries, 1),
            "thresholds_found": max((sender.selection.num_found for sender in self._senders), default=0),
        }
