"""The `torch.compile` backend "tpu": Dynamo's graphs as one XLA program each for forward and backward."""
