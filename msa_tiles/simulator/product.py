"""What products of the tensor cores have in common: a result that an early overwritten operand spoils."""

from __future__ import annotations

from msa_tiles.simulator.errors import RaceError


class WatchedProduct:
    """A product whose operands are watched until somebody has used its result."""

    used = False
    spoiled = ""

    def spoil(self, reason: str) -> None:
        """An operand may have been overwritten too early.

        Raises RaceError when the result has been used; else using it will.
        """
        if self.used:
            raise RaceError(reason)
        self.spoiled = reason

    def use(self) -> None:
        """Somebody reads the result.

        Raises RaceError.
        """
        if self.spoiled:
            raise RaceError(self.spoiled)
        self.used = True
