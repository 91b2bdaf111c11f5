"""The vocabulary of a call: where its tensors stand, what its arguments may be, and their checks."""
