"""The command `msa-tiles`, also as `python -m msa_tiles`."""

from __future__ import annotations

import signal

from msa_tiles import interrupts


def main() -> int:
    """Run `msa_tiles.cli.main`, which is imported here, so that Ctrl-C is heard before."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else Ctrl-C is ignored, or somebody's own
        signal.signal(signal.SIGINT, interrupts.end)
    from msa_tiles import cli

    return cli.main()


if __name__ == "__main__":
    raise SystemExit(main())
