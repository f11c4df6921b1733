"""How operators are recorded, fused and run."""
