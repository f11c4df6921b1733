"""The tracer, which turns PyTorch calls into a program, and what it asks PyTorch for."""
