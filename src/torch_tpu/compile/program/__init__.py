"""A graph of ATen operators as a program: its signature, its inputs and outputs, and cuts where there is no program."""
