"""What `msa-tiles bench` runs: cases, inputs, peers, timing, rows of results, tables and charts."""
