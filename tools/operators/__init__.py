"""How the device answers each ATen overload, and the page docs/operators.md: `python -m tools.operators`."""
