"""Dispatcher kernels: how one PyTorch call on the device becomes a program, and when that program runs."""
