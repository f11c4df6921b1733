"""What `torch-tpu plan` finds out."""
