"""Runs PyTorch's own test database on the device and on the CPU, and says where the two differ."""
