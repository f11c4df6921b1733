"""Fused eager: operators that are recorded, and run later as segments of a graph, each one program."""
