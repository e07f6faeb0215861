"""Everything that compresses in one rank's engine."""

from torchrec.distributed.model_parallel import DistributedModelParallel

from sparse2d.compression.compressor import Compressor
from sparse2d.compression.dense import compress_dense
from sparse2d.compression.lookups import LookupCompression
from sparse2d.config import CompressionConfig, DenseMethod, LookupMethod
from sparse2d.mesh import dense_group


def build_compressors(model: DistributedModelParallel, config: CompressionConfig) -> dict[str, Compressor]:
    """Hook a sharded model that has not run yet, as configured; a collective over all ranks.

    Returns:
        What compresses, by the option's name.
    """
    compressors: dict[str, Compressor] = {}
    if config.dense.method is not DenseMethod.none:
        dense = compress_dense(model._dmp_wrapped_module, config.dense, dense_group())
        if dense is not None:
            compressors["dense"] = dense
    if config.lookup.method is not LookupMethod.none:
        compressors["lookup"] = LookupCompression(model, config.lookup, model.device)
    return compressors
