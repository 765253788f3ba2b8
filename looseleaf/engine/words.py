"""Tokens → text as it grows: pieces that are safe to show, and stop strings that may straddle tokens."""

from __future__ import annotations

from typing import Any


class Words:
    """The text of one answer while its tokens arrive.

    A piece is held back while it ends inside a character or might be the beginning of a stop string.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()):
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        self._settled = 0
        """Tokens from here on are decoded again each time, so that spaces and joined characters come out right."""
        self._read = 0
        """Tokens before this one are in the text. Both borders lie between characters."""
        self._shown = 0
        self.text = ""
        self.stopped = False

    def add(self, token_id: int) -> str:
        """Take a token; the text that may be shown now."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._settled : self._read])
        after = self._decode(self._ids[self._settled :])
        if len(after) > len(before) and not after.endswith("\ufffd"):
            self.text += after[len(before) :]
            self._settled, self._read = self._read, len(self._ids)
        self._cut_at_stop()
        return self._show(len(self.text) if self.stopped else len(self.text) - self._held())

    def finish(self) -> str:
        """No more tokens: whatever was held back."""
        if not self.stopped:
            before = self._decode(self._ids[self._settled : self._read])
            self.text += self._decode(self._ids[self._settled :])[len(before) :]
            self._cut_at_stop()
        return self._show(len(self.text))

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _cut_at_stop(self) -> None:
        places = [at for at in (self.text.find(one) for one in self._stop) if at >= 0]
        if places:
            self.text, self.stopped = self.text[: min(places)], True

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        return max(
            (size for one in self._stop for size in range(1, len(one)) if self.text.endswith(one[:size])), default=0
        )

    def _show(self, upto: int) -> str:
        piece = self.text[self._shown : upto]
        self._shown = max(self._shown, upto)
        return piece
