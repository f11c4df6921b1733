"""What a call of an operator goes through: the fast path, the general path, `out=` forms."""
