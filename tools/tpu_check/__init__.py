"""Whether every lowering compiles for TPUs: `make tpu-check`."""
