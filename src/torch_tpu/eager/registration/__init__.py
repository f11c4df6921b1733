"""Makes the kernels known to PyTorch: a few gates when the package is loaded, all others at the first use."""
