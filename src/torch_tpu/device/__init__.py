"""Everything that makes PyTorch know the device `tpu`, and the module `torch.tpu`."""
