"""Reads checkpoints of whatever origin: nothing in them is run.

Tensors are read with ``weights_only``; what torch's format says of them is a pickle, which could name any code, and is
read with an unpickler that knows a few classes and no other.
"""

import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from sparse2d.errors import UserError

_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    # The second is Python 3.13's.
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}


class _MetadataUnpickler(pickle.Unpickler):
    """After the Python library reference, "Restricting Globals"."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


class CheckpointReader(FileSystemReader):
    """Torch's reader of a ``step-*`` folder, for folders that need not be trusted."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What tensors there are, and where.

        Raises:
            UserError: if the file holds anything else.
        """
        path = self.fs.concat_path(self.path, ".metadata")
        try:
            with self.fs.create_stream(path, "rb") as file:
                metadata = _MetadataUnpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"it holds {type(metadata).__name__}")
        # What a damaged pickle may raise is not limited.
        except Exception as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise UserError(f"{path} is no checkpoint's ({reason}); give another") from error
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata
