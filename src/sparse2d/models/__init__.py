"""Models, built from TorchRec's own modules."""
