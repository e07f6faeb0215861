"""Numbers as people read them."""


def size(num_bytes: float) -> str:
    """Bytes with a decimal unit and three digits: ``12.3 MB``."""
    for unit in ("B", "KB", "MB", "GB"):
        # What would be rounded to 1000 is one of the next unit.
        if abs(num_bytes) < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"
