"""Storages of the device: what they hold, tensors over them, and copies to and from the host."""
