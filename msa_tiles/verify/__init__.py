"""Run cells on the GPU present and compare them with the reference; the evidence goes to `generated/verified.json`."""
