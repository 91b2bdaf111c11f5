"""Device helpers that generated CuTe DSL kernels import."""
