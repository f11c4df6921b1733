"""Kernels written by hand, for operators that are more, or less, than one program."""
