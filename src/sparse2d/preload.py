"""What the fork server imports before the first rank is forked from it.

A library that does not load is not told here: ``check_environment`` does, in one line.
"""

import atexit
import os
from contextlib import suppress

with suppress(Exception):
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401
    import torch.distributed.tensor  # noqa: F401
    import wandb.sdk.launch  # noqa: F401  (what wandb.init imports, a second)

    import sparse2d.loop  # noqa: F401  (torch, FBGEMM and TorchRec with it)

# Whoever started the server waits for its end, and TorchRec takes more than a second to be torn down; ranks, which are
# forked from it, end on their own.
atexit.register(os._exit, 0)
