"""The backend that Dynamo calls: from its graph to forward and backward graphs, and the cache of these."""
