"""PyTorch's own test database in float32, and a part of the rest that changes every day. All: make conformance."""
