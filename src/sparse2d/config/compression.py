"""Options of compressed traffic, after Dynamic Communication Thresholding (arXiv 2010.08899), and their checks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from sparse2d.errors import UserError


class DenseMethod(Enum):
    """How gradients of the dense part are sent.

    ``allreduce`` compresses nothing and shows what a hook costs; ``dct`` is DCT-DP, ``topk`` its threshold found anew
    in every step; ``powersgd`` (arXiv 1905.13727), ``bf16`` and ``fp16`` are torch's own hooks.
    """

    none = "none"
    allreduce = "allreduce"
    dct = "dct"
    topk = "topk"
    powersgd = "powersgd"
    bf16 = "bf16"
    fp16 = "fp16"


class LookupMethod(Enum):
    """How pooled embeddings and their gradients are sent.

    ``dct`` is DCT-MP, ``topk`` keeps the same number of entries of every vector, ``qcomm_*`` are TorchRec's codecs.
    """

    none = "none"
    dct = "dct"
    topk = "topk"
    qcomm_bf16 = "qcomm_bf16"
    qcomm_fp16 = "qcomm_fp16"
    qcomm_int8 = "qcomm_int8"


class AveragingMethod(Enum):
    """How changes of table rows are sent to the replicas: ``dct`` and ``topk`` as of dense gradients."""

    none = "none"
    dct = "dct"
    topk = "topk"


class ValueDtype(Enum):
    """What an entry that is sent is rounded to."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Scope(Enum):
    """What a threshold is for: each parameter (the paper's layers), or all of them."""

    parameter = "parameter"
    model = "model"


@dataclass
class ThresholdConfig:
    """Which entries are sent: those whose magnitude reaches a threshold (arXiv 2010.08899, section 3)."""

    # Share of the entries that the threshold lets through when it is found.
    density: float = 0.01
    # L, steps for which a threshold is used before it is found anew.
    lifetime: int = 1000
    value_dtype: ValueDtype = ValueDtype.fp32
    # Over so many steps the density falls from 1 to its value, in equal ratios.
    warmup_steps: int = 0


@dataclass
class DenseCompressionConfig(ThresholdConfig):
    """Gradients of the dense part, with error feedback."""

    method: DenseMethod = DenseMethod.none
    scope: Scope = Scope.parameter
    # Of powersgd: rank of its matrices.
    rank: int = 1


@dataclass
class LookupCompressionConfig(ThresholdConfig):
    """Pooled embeddings on their way to the rows' ranks, and their gradients on the way back."""

    method: LookupMethod = LookupMethod.none


@dataclass
class AveragingCompressionConfig(ThresholdConfig):
    """Changes of table rows since the last averaging of the replicas, with error feedback."""

    method: AveragingMethod = AveragingMethod.none


@dataclass
class CompressionConfig:
    """What is compressed of data-parallel (``dense``, ``averaging``) and model-parallel (``lookup``) traffic."""

    dense: DenseCompressionConfig = field(default_factory=DenseCompressionConfig)
    lookup: LookupCompressionConfig = field(default_factory=LookupCompressionConfig)
    averaging: AveragingCompressionConfig = field(default_factory=AveragingCompressionConfig)

    @property
    def is_on(self) -> bool:
        """Whether anything is compressed."""
        return self != CompressionConfig()


# Options that a method reads; the others must be left alone. Those of no method are not listed.
_THRESHOLD = ("density", "lifetime", "value_dtype", "warmup_steps")
_READS: Mapping[Enum, tuple[str, ...]] = {
    DenseMethod.dct: (*_THRESHOLD, "scope"),
    DenseMethod.topk: ("density", "value_dtype", "warmup_steps", "scope"),
    DenseMethod.powersgd: ("rank", "warmup_steps"),
    LookupMethod.dct: _THRESHOLD,
    LookupMethod.topk: ("density", "value_dtype", "warmup_steps"),
    AveragingMethod.dct: _THRESHOLD,
    AveragingMethod.topk: ("density", "value_dtype", "warmup_steps"),
}


def check_compression(config: CompressionConfig) -> None:
    """Refuse numbers that mean nothing and options that the method does not read.

    Raises:
        UserError: one line with the number and the remedy.
    """
    for part in fields(config):
        _check_part(f"compression.{part.name}", getattr(config, part.name))


def _check_part(prefix: str, part: Any) -> None:
    if not 0 < part.density <= 1:
        raise UserError(f"{prefix}.density={part.density:g} must be in (0, 1]: the share of the entries that is sent")
    for name, least in {"lifetime": 1, "warmup_steps": 0, "rank": 1}.items():
        if getattr(part, name, least) < least:
            raise UserError(f"{prefix}.{name}={getattr(part, name)} must be at least {least}")
    for option in fields(part):
        value = getattr(part, option.name)
        if option.name == "method" or option.name in _READS.get(part.method, ()) or value == option.default:
            continue
        text = value.name if isinstance(value, Enum) else f"{value:g}"
        raise UserError(f"{prefix}.{option.name}={text} has no effect with {prefix}.method={part.method.name}")
