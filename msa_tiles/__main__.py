"""`python -m msa_tiles`: the command `msa-tiles`."""

from msa_tiles.cli import main

raise SystemExit(main())
