"""The operators in torch: their registration, calls that were seen before, autograd."""
