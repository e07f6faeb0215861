"""What NumPy's files can do and NumPy does not offer: append rows to a .npy file, map the arrays of an .npz file."""

import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparse2d.errors import UserError

_LOCAL_HEADER_BYTES, _NAME_LENGTHS_AT = 30, 26


@contextmanager
def npy_appender(path: Path, dtype: DTypeLike, columns: int) -> Iterator[Callable[[NDArray[Any]], None]]:
    """Write a 2-D array in memory of one chunk: yields the function that appends rows, [n, columns] of ``dtype``."""
    dtype = np.dtype(dtype)
    with path.open("wb") as file:
        _write_header(file, dtype, 0, columns)
        start = file.tell()

        def append(chunk: NDArray[Any]) -> None:
            if chunk.dtype != dtype or chunk.shape[1:] != (columns,):
                raise TypeError(f"chunk {chunk.dtype}{chunk.shape}, expected {dtype}(n, {columns})")
            file.write(np.ascontiguousarray(chunk).data)

        yield append
        rows = (file.tell() - start) // (dtype.itemsize * columns)
        # NumPy pads the header, so that it can be completed in place.
        file.seek(0)
        _write_header(file, dtype, rows, columns)


def _write_header(file: BinaryIO, dtype: np.dtype[Any], rows: int, columns: int) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (rows, columns)}
    np.lib.format.write_array_header_1_0(file, header)


def map_npz(path: Path) -> list[NDArray[Any]]:
    """Memory maps of the arrays "0", "1", ... of an .npz file that is stored without compression (``numpy.savez``).

    Raises:
        UserError: if it is no such file.
    """
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            return [_map_member(path, file, archive.getinfo(f"{i}.npy")) for i in range(len(archive.namelist()))]
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, struct.error) as error:
        raise UserError(f"{path}: not an .npz file of arrays 0, 1, ... ({error}); write it with numpy.savez") from error


def _map_member(path: Path, file: BinaryIO, member: zipfile.ZipInfo) -> NDArray[Any]:
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is compressed, and cannot be read in place")
    # A zip member's data follows its local header, whose name and extra field have their own lengths.
    file.seek(member.header_offset + _NAME_LENGTHS_AT)
    name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
    file.seek(member.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }[np.lib.format.read_magic(file)]
    shape, fortran, dtype = read_header(file)
    return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")
