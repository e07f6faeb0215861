"""What belongs to one rank alone: random number generators, the averager's notes, the open window of metrics.

Everything becomes plain tensors, so that nothing in a checkpoint's payload needs unpickling.
"""

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Generators' words are unsigned 32-bit integers and their cached numbers doubles: a double holds both exactly.
_EXACT = torch.float64
# Stands for a tensor in the structure around it.
_TENSOR = "$tensor"


def seed_rng(seed: int, rank: int) -> None:
    """Seed every global generator of this process, differently on each rank."""
    words = np.random.SeedSequence([seed, rank]).generate_state(3).tolist()
    for seed_generator, word in zip((torch.manual_seed, random.seed, np.random.seed), words, strict=True):
        seed_generator(word)


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """The state of every global generator of this process."""
    version, words, cached = random.getstate()
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)
    assert (version, kind) == (3, "MT19937")
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([*words, float("nan") if cached is None else cached], dtype=_EXACT),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss, gauss], dtype=_EXACT),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Set what ``rng_state`` gave."""
    torch.set_rng_state(state["torch"])
    *words, cached = state["python"].tolist()
    random.setstate((3, tuple(map(int, words)), None if np.isnan(cached) else cached))
    *keys, position, has_gauss, gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), int(position), int(has_gauss), gauss))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def flatten(value: Any, prefix: str) -> dict[str, Tensor]:
    """Tensors of nested dicts and lists by name, and under ``structure`` all the rest, as bytes of JSON.

    Args:
        value: dicts with text keys, lists, tensors, numbers, text and None.
        prefix: of all names.
    """
    tensors: list[Tensor] = []

    def plain(item: Any) -> Any:
        if isinstance(item, Tensor):
            tensors.append(item)
            return {_TENSOR: len(tensors) - 1}
        if isinstance(item, Mapping):
            return {key: plain(part) for key, part in item.items()}
        return [plain(part) for part in item] if isinstance(item, list | tuple) else item

    text = json.dumps(plain(value))
    flat = {f"{prefix}/{number}": tensor for number, tensor in enumerate(tensors)}
    return flat | {f"{prefix}/structure": torch.tensor(list(text.encode()), dtype=torch.uint8)}


def unflatten(flat: Mapping[str, Tensor], prefix: str) -> Any:
    """The value that ``flatten`` took; tuples have become lists."""
    structure = bytes(flat[f"{prefix}/structure"].tolist())

    def restored(item: dict[str, Any]) -> Any:
        return flat[f"{prefix}/{item[_TENSOR]}"] if item.keys() == {_TENSOR} else item

    return json.loads(structure, object_hook=restored)
