"""ATen → StableHLO: one file per family of operators, one lowering per operator; `families` loads them."""
