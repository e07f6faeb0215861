"""Append rows to a .npy file whose number of rows is known only at the end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray


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
