"""Token ids to text, piece by piece: no half characters, no beginning of a stop string, nothing lost or said twice.

A `TextStream` is two stages: `Detokenizer` turns ids into the text that later ids cannot change any more, and
`StopMatcher` holds that text back while it may be the beginning of a stop string. Neither knows what a tokenizer
is beyond "ids to text", nor what a generation is. Invariant: whatever the pieces, the joined text is the decoded
whole, up to the first stop string. The cost of a token does not grow with the length of the reply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

REPLACEMENT = "\ufffd"

MAX_WINDOW = 16  # ids decoded at a time
MIN_WINDOW = 8  # ids kept when the window slides: eight bytes are three U+FFFD at least, so all unsaid ones stay


class Detokenizer:
    """Decodes the newest ids together with a few before them, which give the context a decoder needs.

    `decode` may drop a space at the start of what it is given (SentencePiece), write an unfinished character as
    one U+FFFD (byte-level BPE), or turn a whole run of byte ids into U+FFFD while its last character is unfinished
    (byte fallback in `tokenizers`). Where an id makes `decode` change text that was said already, the said text
    stands, and that id begins a window of its own.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._text = ""  # of the window
        self._num_said = 0  # characters of _text

    def push(self, token: int) -> str:
        """The text that `token` makes certain, "" if none."""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.startswith(self._text[: self._num_said]):
            rest = self.flush()
            self._window, self._text, self._num_said = [], "", 0
            return rest + self.push(token)
        if text and text == self._text and not self._decode([token]):
            self._window.pop()  # a special token: a window of nothing else would lose the context
            return ""
        # An unfinished character shows as three U+FFFD at most; those before them are there to stay.
        certain = max(len(text.rstrip(REPLACEMENT)), len(text) - 3)
        fresh = text[self._num_said : certain]
        self._text, self._num_said = text, certain
        if len(self._window) > MAX_WINDOW:
            self._slide()
        return fresh

    def flush(self) -> str:
        """The rest, with U+FFFD for a character that was never finished."""
        rest = self._text[self._num_said :]
        self._num_said = len(self._text)
        return rest

    def _slide(self) -> None:
        """Drop the oldest ids. Where that halves a character, U+FFFD in its place is counted as said."""
        num_unsaid = len(self._text) - self._num_said
        del self._window[:-MIN_WINDOW]
        self._text = self._decode(self._window)
        self._num_said = len(self._text) - num_unsaid


class StopMatcher:
    """Passes text on up to the first of `stops` (none empty) to complete, holding what may be its beginning.

    The first to complete wins, as if the text came by single characters: the outcome does not depend on how the
    text is cut into pieces, and the generation ends as soon as it can. Of several that complete with the same
    character, the longest wins, so that no part of any is left in the text. Knuth, Morris and Pratt's automaton
    per stop string keeps the cost of a character constant.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [(stop, _failures(stop)) for stop in stops]
        self._num_matched = [0] * len(self._stops)
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, text: str) -> str:
        """The part of `text`, and of what was held before it, that is surely not in a stop string."""
        for at, char in enumerate(text if self._stops else ""):
            self.stopped_by = self._advance(char)
            if self.stopped_by is not None:
                end = at + 1 - len(self.stopped_by)
                return self._held[:end] if end < 0 else self._held + text[:end]
        text = self._held + text
        num_free = len(text) - max(self._num_matched, default=0)
        self._held = text[num_free:]
        return text[:num_free]

    def flush(self) -> str:
        """The held text, which turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """The longest stop string that `char` completes."""
        completed = None
        for i, (stop, failures) in enumerate(self._stops):
            matched = self._num_matched[i]
            while matched and stop[matched] != char:
                matched = failures[matched]
            matched += stop[matched] == char
            self._num_matched[i] = matched
            if matched == len(stop) and (completed is None or matched > len(completed)):
                completed = stop
        return completed


def _failures(stop: str) -> list[int]:
    """For each length n below len(stop), the longest proper prefix of stop[:n] that is also its suffix."""
    failures = [0, 0]
    for n in range(1, len(stop) - 1):
        matched = failures[n]
        while matched and stop[matched] != stop[n]:
            matched = failures[matched]
        failures.append(matched + (stop[matched] == stop[n]))
    return failures


class Lines:
    """Passes text on up to the first line that is indented by less than `least` blanks and tabs, which `is_outdented`
    then says. The first line may begin as it likes; an empty one is not indented at all."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._missing = 0  # of the current line's indentation
        self.has_new_line = False
        self.is_outdented = False

    def push(self, text: str) -> str:
        self.has_new_line = self.has_new_line or "\n" in text
        for at, char in enumerate(text if self._least else ""):
            if self._missing and char not in " \t":
                self.is_outdented = True
                return text[:at]
            self._missing = self._least if char == "\n" else max(self._missing - 1, 0)
        return text


class TextStream:
    """The text of one generation. `stopped_by` is the stop string that ended it, if one did; `is_outdented` says that
    a line with less than `least_indent` did.

    After that nothing more comes: the stop string, or the rest of that line, and all behind it are dropped.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: tuple[str, ...], least_indent: int = 0) -> None:
        self._detokenizer = Detokenizer(decode)
        self._matcher = StopMatcher(stop)
        self._lines = Lines(least_indent)

    @property
    def stopped_by(self) -> str | None:
        return self._matcher.stopped_by

    @property
    def is_outdented(self) -> bool:
        return self._lines.is_outdented

    @property
    def has_new_line(self) -> bool:
        return self._lines.has_new_line

    def push(self, token: int) -> str:
        """New text that is certain now; "" while it is held, and after the end."""
        if self.stopped_by is not None or self.is_outdented:
            return ""
        return self._lines.push(self._matcher.push(self._detokenizer.push(token)))

    def flush(self) -> str:
        """The held rest, at a healthy end: a partial stop string, a character cut short as U+FFFD.

        The rest may complete a stop string that contains U+FFFD, so `stopped_by` can still change here.
        """
        if self.stopped_by is not None or self.is_outdented:
            return ""
        rest = self._matcher.push(self._detokenizer.flush())
        return self._lines.push(rest if self.stopped_by is not None else rest + self._matcher.flush())
