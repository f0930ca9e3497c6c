"""Stop strings in a text that arrives in parts."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string, and holds back what may be the beginning of one.

    The text is read one character at a time, so the parts it comes in do not matter: the stop string that is
    complete first ends the text, the longest if several are, and the text is cut where that one begins.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = ""
        self.hit = False

    def push(self, text: str) -> str:
        """Text that cannot become part of a stop string any more; nothing once a stop string was hit."""
        if self.hit:
            return ""
        if not self._matchers:
            return text
        for end, char in enumerate(text, 1):
            complete = [m.length for m in self._matchers if m.advance(char)]
            if complete:
                self.hit = True
                return _all_but_last(self._held + text[:end], max(complete))
        text = self._held + text
        num_held = max(m.matched for m in self._matchers)
        self._held = text[len(text) - num_held :]
        return _all_but_last(text, num_held)

    def flush(self) -> str:
        """What was held back, once no more text will come; nothing after a hit."""
        return "" if self.hit else self._held


class _Matcher:
    """Knuth, Morris and Pratt's automaton: `matched` counts how much of the pattern's start ends the text."""

    def __init__(self, pattern: str) -> None:
        self.length = len(pattern)
        self.matched = 0
        self._pattern = pattern
        self._fallback = [0] * len(pattern)
        for i in range(1, len(pattern)):
            self._fallback[i] = self._next(self._fallback[i - 1], pattern[i])

    def advance(self, char: str) -> bool:
        """Reads a character; true where the pattern is complete."""
        self.matched = self._next(self.matched, char)
        return self.matched == self.length

    def _next(self, matched: int, char: str) -> int:
        while matched and self._pattern[matched] != char:
            matched = self._fallback[matched - 1]
        return matched + (self._pattern[matched] == char)


def _all_but_last(text: str, count: int) -> str:
    return text[: len(text) - count]
