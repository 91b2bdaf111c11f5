"""The subcommands of `msa-tiles`, one module each."""
