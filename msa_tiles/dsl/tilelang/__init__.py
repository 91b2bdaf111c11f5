"""Device helpers that generated TileLang kernels import."""
