"""Reads a function call out of JSON text while it arrives: the name as soon as it is there, the arguments' own characters as they come.

Not a JSON parser: it follows strings, brackets and commas, takes whatever the model wrote, and never judges it. What the model wrote
is passed on character for character, so that the joined pieces are the model's text.
"""

import json

SPACE = " \t\r\n"
NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters", "args")


def json_text(raw: str) -> str:
    """The value of a JSON string literal; the characters between its quotes where it is none."""
    try:
        value = json.loads(raw)
    except ValueError:
        return raw.strip('"')
    return value if isinstance(value, str) else raw


class ValueScanner:
    """Follows one JSON value: `push` says how many characters of a piece belong to it. is_done: it is complete."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._in_string = self._is_escaped = self._is_begun = self._is_bare = False

    def push(self, text: str) -> int:
        """Characters of `text` that are part of the value; all of them until it is done. Leading space counts."""
        for at, char in enumerate(text):
            if self._step(char):
                self.is_done = True
                return at if self._is_bare else at + 1
        return len(text)

    def _step(self, char: str) -> bool:
        """Takes one character; whether it ends the value (a number or word is ended by what follows it)."""
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
                return self._depth == 0
            return False
        if self._is_bare:
            return char in ",]}" or char in SPACE
        if char == '"':
            self._is_begun = self._in_string = True
        elif char in "{[":
            self._is_begun = True
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth <= 0
        elif not self._is_begun and char not in SPACE:
            self._is_bare = self._is_begun = True
        return False


class CallScanner:
    """Follows one object like {"name": "f", "arguments": {...}}, in either order, with other keys passed over.

    name: known once it was read. take(): arguments' characters not yet taken; they wait for the name. first_key: the object's first key,
    for telling a call from other JSON. is_done: the object is closed. is_broken: this is no object.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.first_key: str | None = None
        self.has_arguments = False
        self.is_done = False
        self.is_broken = False
        self._arguments = ""
        self._state = self._open
        self._key = ""
        self._text = ""
        self._value = ValueScanner()

    def push(self, text: str) -> int:
        """Takes a piece; how many of its characters were used (all, until the object is done)."""
        at = 0
        while at < len(text) and not (self.is_done or self.is_broken):
            at = self._state(text, at)
        return at

    def take(self) -> str:
        """Characters of the arguments that are new and may be shown."""
        if self.name is None:
            return ""
        text, self._arguments = self._arguments, ""
        return text

    def _open(self, text: str, at: int) -> int:
        if text[at] == "{":
            self._state = self._before_key
        elif text[at] not in SPACE:
            self.is_broken = True
            return at
        return at + 1

    def _before_key(self, text: str, at: int) -> int:
        char = text[at]
        if char == "}":
            self.is_done = True
        elif char == '"':
            self._key, self._value = "", ValueScanner()
            self._state = self._in_key
            return at
        elif char != "," and char not in SPACE:
            self.is_broken = True
            return at
        return at + 1

    def _in_key(self, text: str, at: int) -> int:
        used = self._value.push(text[at:])
        self._key += text[at : at + used]
        if self._value.is_done:
            self._key = json_text(self._key)
            self.first_key = self.first_key or self._key
            self._state = self._before_value
        return at + used

    def _before_value(self, text: str, at: int) -> int:
        if text[at] == ":" or text[at] in SPACE:
            return at + 1
        self._text, self._value = "", ValueScanner()
        self._state = self._in_value
        return at

    def _in_value(self, text: str, at: int) -> int:
        used = self._value.push(text[at:])
        piece = text[at : at + used]
        if self._key in ARGUMENT_KEYS:
            self.has_arguments = True
            self._arguments += piece
        else:
            self._text += piece
        if self._value.is_done:
            if self._key in NAME_KEYS and self.name is None:
                self.name = json_text(self._text)
            self._state = self._before_key
        return at + used
