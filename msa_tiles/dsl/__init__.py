"""Device helpers that generated kernels import, one package per DSL."""
