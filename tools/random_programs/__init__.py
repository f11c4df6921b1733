"""Random programs: small PyTorch scripts drawn from a seed, run in lock-step on the CPU and on the device."""
