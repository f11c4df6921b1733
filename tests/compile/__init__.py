"""What torch.compile makes of a model on the device."""
