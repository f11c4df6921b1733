"""Equal layers of a graph: found, handled once, and run as one program that is launched for each."""
