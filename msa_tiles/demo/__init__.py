"""`msa-tiles demo`: selection and sparse attention over a real text, checked against dense attention."""
