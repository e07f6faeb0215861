"""TorchRec's own codecs of pooled embeddings, to compare with."""

from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.types import QuantizedCommCodecs

from sparse2d.config import LookupMethod

PRECISIONS = {
    LookupMethod.qcomm_bf16: CommType.BF16,
    LookupMethod.qcomm_fp16: CommType.FP16,
    LookupMethod.qcomm_int8: CommType.INT8,
}
# What is summed on its way, as row-wise partial sums are: bytes with a scale for each row cannot be.
SUMMED = PRECISIONS | {LookupMethod.qcomm_int8: CommType.FP16}


def torchrec_codecs(precision: CommType) -> QuantizedCommCodecs:
    """The same precision forward and backward.

    TorchRec's registry of codecs takes fp16 for bf16 on the CPU; gloo of torch 2.13 sends and sums bf16.
    """
    return get_qcomm_codecs(QCommsConfig(forward_precision=precision, backward_precision=precision))
