"""Runs a folder of small programs on the device, each in a process of its own, and counts which pass."""
