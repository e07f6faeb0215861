"""Reference formulas of the optimizers and the fused kernels that must equal them."""
