"""The bucket policy of `torch.compile`: sizes that vary are rounded up, so that few programs serve many shapes."""
