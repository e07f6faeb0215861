"""Start-up check: do torch, torchrec and FBGEMM load together and compute?"""

import importlib.metadata
import sys
from functools import cache

from sparse2d.config import Device
from sparse2d.errors import UserError

WANTED = {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0"}


def installed_version(package: str) -> str | None:
    """Version of an installed package without its local part (``+cpu``); None if absent."""
    try:
        return importlib.metadata.version(package).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def found_versions() -> dict[str, str | None]:
    """The triple that must match; FBGEMM is ``fbgemm-gpu-cpu`` on CPU and ``fbgemm-gpu`` on CUDA."""
    return {
        "torch": installed_version("torch"),
        "torchrec": installed_version("torchrec"),
        "fbgemm-gpu": installed_version("fbgemm-gpu-cpu") or installed_version("fbgemm-gpu"),
    }


@cache
def check_environment() -> None:
    """Call one FBGEMM operator.

    Raises:
        UserError: if it does not load or compute, with the three versions wanted and found.
    """
    try:
        import fbgemm_gpu  # noqa: F401  (registers the operators)
        import torch

        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([1, 2]))
        works = offsets.tolist() == [0, 1, 3]
    except (ImportError, OSError, AttributeError, RuntimeError):
        works = False
    if not works:
        wanted = ", ".join(f"{name} {version}" for name, version in WANTED.items())
        found = ", ".join(f"{name} {version or 'absent'}" for name, version in found_versions().items())
        raise UserError(f"FBGEMM does not work here: wanted {wanted}; found {found}; install with `make environment`")


def check_device(wanted: Device) -> None:
    """Refuse CUDA where there is none, before ranks are started.

    Raises:
        UserError: if ``launch.device=cuda`` and torch finds no GPU.
    """
    if wanted is Device.cuda:
        import torch

        if not torch.cuda.is_available():
            raise UserError(
                "launch.device=cuda, but torch finds no GPU here; use launch.device=cpu or ACCEL=cuda to install"
            )


if __name__ == "__main__":
    try:
        check_environment()
    except UserError as error:
        sys.exit(f"sparse2d.environment: error: {error}")
