"""The process group `tpu_dist`: collectives of `torch.distributed` between processes that have one device each."""
