"""A thin, typed builder over StableHLO: torch dtypes in, MLIR out. Knows neither ATen nor devices."""
