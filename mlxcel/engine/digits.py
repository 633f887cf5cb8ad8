"""How long the numbers of constrained JSON may get.

A schema lets a number have digits for ever, and a small model likes to go on with them until it is cut. llama-server
allows 16 before the point, after it and in the exponent; here 20 before it, so that 64-bit integers are whole, and 3
in the exponent, which is all that a double has. Pure: it reads the JSON as it is written and says how many digits may
follow. Invariant: a digit that the schema insists on is never taken away (the caller keeps a choice).
"""

from __future__ import annotations

INTEGER_DIGITS = 20
FRACTION_DIGITS = 16
EXPONENT_DIGITS = 3
UNLIMITED = 255  # fits a byte, and no token is as long


class DigitRoom:
    """Where the JSON text that was pushed stands. `room` is the number of digits that may come next."""

    def __init__(self) -> None:
        self.room = INTEGER_DIGITS
        self._in_string = False
        self._escaped = False

    def push(self, text: bytes) -> None:
        for byte in text:
            self._take(byte)

    def _take(self, byte: int) -> None:
        if self._in_string:
            self._take_in_string(byte)
        elif byte in b"0123456789":
            self.room = max(self.room - 1, 0)
        elif byte == ord("."):
            self.room = FRACTION_DIGITS
        elif byte in b"eE":
            self.room = EXPONENT_DIGITS
        elif byte == ord('"'):
            self._in_string, self.room = True, UNLIMITED
        elif byte not in b"+-":
            self.room = INTEGER_DIGITS

    def _take_in_string(self, byte: int) -> None:
        if self._escaped:
            self._escaped = False
        elif byte == ord("\\"):
            self._escaped = True
        elif byte == ord('"'):
            self._in_string, self.room = False, INTEGER_DIGITS


def leading_digits(piece: bytes) -> int:
    """How many digits a token begins with."""
    return min(len(piece) - len(piece.lstrip(b"0123456789")), UNLIMITED)
