"""A parser that reads tool calls, in each of the formats of `calls`, while the text grows."""

import json
from collections.abc import Callable, Collection, Generator, Mapping
from types import MappingProxyType
from typing import Any

from .calls import Answer, ArgumentsDelta, CallBegin, CallFormat, CallTags, ContentDelta, Delta
from .harmony import HarmonyParser
from .parameter_types import Schema, is_text, json_of, keywords_of, properties_of, types_of
from .scans import PAIRS, SPACE, NotACallError, Scan, scan_one_of, scan_space, scan_string, scan_up_to, scan_value

_BETWEEN = SPACE + ",;"  # what may stand between two calls
_KEYS = frozenset({"name", "arguments", "parameters", "type", "id", "tool_name", "tool_call_id"})
_CLOSING = "}]"
_HALF = "\ufffd"
_OUTSIDE = frozenset(SPACE + '{}[]:,"+-.0123456789eEtrufalsn')  # characters of JSON outside of its strings

NO_SCHEMAS: Mapping[str, Schema] = MappingProxyType({})


def read_calls(
    text: str,
    form: CallFormat,
    names: Collection[str],
    *,
    single: bool = False,
    schemas: Mapping[str, Schema] = NO_SCHEMAS,
    cut: bool = False,
) -> Answer:
    """Content and calls of a finished text.

    Args:
        text: the model's answer
        form: the format of calls
        names: names of the tools that the model was offered
        single: read one call at most, and nothing after it
        schemas: schemas of the tools' parameters, by tool name; needed where values are plain text
        cut: the text does not end by itself (a limit of length, a stop string): see `CallParser.finish`
    """
    answer, parser = Answer(), parser_of(form, names, single=single, schemas=schemas)
    answer.add(parser.push(text))
    answer.add(parser.finish(cut=cut))
    return answer


def parser_of(
    form: CallFormat, names: Collection[str], *, single: bool = False, schemas: Mapping[str, Schema] = NO_SCHEMAS
) -> "CallParser | HarmonyParser":
    """A parser of answers in a format; arguments as of `CallParser`."""
    if form.name == "harmony":
        return HarmonyParser(form, single=single)
    return CallParser(form, names, single=single, schemas=schemas)


class CallParser:
    """Reads calls from a text that comes in pieces. The sum of its deltas does not depend on the pieces.

    Content is passed on at once but for its end, while that can be the beginning of a marker, or white space before
    one; white space before and between calls is dropped. A call begins when its name and the beginning of its arguments
    are there. A text that is no call up to there is content; one that turns out not to be JSON later is passed on as it
    is, as the rest of the arguments. Brackets and markers too many at the end of a call are dropped.
    """

    done: bool = False
    """True once nothing that follows can matter: one call was wanted and is complete"""

    def __init__(
        self,
        form: CallFormat,
        names: Collection[str],
        *,
        single: bool = False,
        schemas: Mapping[str, Schema] = NO_SCHEMAS,
    ) -> None:
        """Begin an answer.

        Args:
            form: the format of calls
            names: names of the tools that the model was offered
            single: report one call at most, and nothing after it
            schemas: schemas of the tools' parameters, by tool name: they say the types of values that are plain text
        """
        self._form = form
        self._names = names
        self._single = single
        self._schemas = schemas
        self._marked = True  # the call at hand came after its marker
        self._unmarked = [form.tags.function[0]] if form.tags is not None and form.tags.function[0] else []
        self._state: Callable[[], bool] = self._content if form.begin else self._start
        self._pending = ""  # text that no state has used yet
        self._half = ""  # what a character that is not complete is shown as, at the end
        self._deltas: list[Delta] = []
        self._calls = 0
        self._after_call = False  # nothing but white space since a call
        self._written = False  # some content
        self._raw = ""  # text since the last call, which is content if it proves to be none
        self._scan: Generator[None, str, None] | None = None
        self._name: str | None = None
        self._begun = False  # reported: its name and its first arguments are known
        self._complete = False  # its arguments are
        self._early = ""  # arguments before the name
        self._first = True  # no argument of XML yet

    @property
    def called(self) -> bool:
        """True once a call has begun."""
        return self._calls > 0

    def push(self, text: str) -> list[Delta]:
        """Add text; returns what is new."""
        text = self._half + text
        whole = text.rstrip(_HALF)
        self._half = text[len(whole) :]
        self._pending += whole
        while self._pending and not self.done and self._state():
            pass
        return self._taken()

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """End the text; returns what was held back.

        A call that is not complete is no content: with its name and the beginning of its arguments it is reported as
        far as it goes, before that not at all.

        Args:
            cut: the text does not end by itself, so what may be the beginning of a call or of its marker is one
        """
        if not self.done:
            self._pending += "" if cut else self._half
            rest = self._raw + self._pending
            if self._begun and not self._complete:
                self._argue(self._pending)
            elif not self._within_call(cut):
                self._write(rest if not self._after_call or rest.strip(_BETWEEN) else "")
        self._pending, self.done = "", True
        return self._taken()

    def _within_call(self, cut: bool) -> bool:
        """Whether the text at its end is part of a call, or of the markers around it."""
        if self._state in (self._after, self._broken):
            return True
        if self._state == self._inside:
            return cut or self._calls > 0 or bool(self._form.begin)
        text = self._pending.lstrip(SPACE)
        return (cut or self._after_call) and bool(text) and self._state in (self._start, self._content)

    def _taken(self) -> list[Delta]:
        """The deltas since the last call, neighbours of one kind joined."""
        joined: list[Delta] = []
        for delta in self._deltas:
            last = joined[-1] if joined else None
            if isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
                joined[-1] = ContentDelta(last.text + delta.text)
            elif isinstance(delta, ArgumentsDelta) and isinstance(last, ArgumentsDelta) and last.index == delta.index:
                joined[-1] = ArgumentsDelta(last.index, last.text + delta.text)
            else:
                joined.append(delta)
        self._deltas = []
        return joined

    # --- states: each uses some of the pending text; False if it needs more -------------------------------------------

    def _start(self) -> bool:
        """The beginning of an answer in a format without a marker."""
        text, openings = self._pending.lstrip(SPACE), self._form.openings
        if any(opening.startswith(text) and opening != text for opening in openings):
            return False  # it may become that opening
        text = text.removeprefix(next(filter(text.startswith, openings), "")).lstrip(SPACE)
        if not text:
            return False
        if text[0] not in PAIRS:
            self._state = self._rest
            return True
        self._enter(len(self._pending) - len(text))
        return True

    def _rest(self) -> bool:
        """Content up to the end."""
        self._write(self._pending)
        self._pending = ""
        return False

    def _content(self) -> bool:
        """Content that a marker may end."""
        text, markers = self._pending, [self._form.begin, *self._unmarked]
        at, begin = min(((at, marker) for marker in markers if (at := text.find(marker)) >= 0), default=(-1, ""))
        if at >= 0:
            free = text[:at].rstrip(SPACE)
            self._write(free)
            self._pending = text[len(free) :]
            self._marked = begin == self._form.begin
            self._enter(at - len(free) + (len(begin) if self._marked else 0))
            return True
        free = text[: len(text) - max(_begun(text, marker) for marker in markers)].rstrip(SPACE)
        self._write(free)
        self._pending = text[len(free) :]
        return False

    def _enter(self, length: int) -> None:
        """Begin to read calls after the next `length` characters, the marker."""
        self._raw, self._pending = self._pending[:length], self._pending[length:]
        self._scan = self._region()
        next(self._scan)
        self._state = self._inside

    def _inside(self) -> bool:
        """Calls, up to the end of an object or a list."""
        assert self._scan is not None
        text = self._pending
        for position, character in enumerate(text, start=1):
            try:
                if not self._begun:
                    self._raw += character
                self._scan.send(character)
            except StopIteration:
                self._state = self._after
                if not self._after_call:  # an empty list
                    self._write(self._raw)
                    self._state = self._content_or_rest()
                self._pending, self._raw = text[position:], ""
                return not self.done
            except NotACallError:
                self._pending = text[position - 1 :]
                self._give_up()
                return True
            if self.done:
                return False
        self._pending = ""
        return False

    def _give_up(self) -> None:
        """Treat what cannot be read as content, or as the rest of the arguments."""
        if self._begun and (not self._complete or (self._form.begin and self._form.end)):
            self._state = self._broken
            return
        if self._begun:
            self._end_call()
            self._state = self._after
            return
        raw, self._raw = self._raw[:-1], ""  # the last character has not been used
        self._write(raw.lstrip(_BETWEEN) if self._after_call else raw)
        self._state = self._content_or_rest()

    def _content_or_rest(self) -> Callable[[], bool]:
        """The state of text outside of calls."""
        return self._content if self._form.begin else self._rest

    def _broken(self) -> bool:
        """Text that is not JSON, up to the marker after the call: more of its arguments, or nothing after these."""
        text, end = self._pending, self._form.end
        at = text.find(end) if end else -1
        if at >= 0:
            self._argue("" if self._complete else text[:at].rstrip(SPACE))
            self._pending = text[at + len(end) :]
            self._end_call()
            self._state = self._content_or_rest()
            return True
        free = text[: len(text) - _begun(text, end)].rstrip(SPACE)
        self._argue("" if self._complete else free)
        self._pending = text[len(free) :]
        return False

    def _after(self) -> bool:
        """After calls: brackets too many, the marker at their end, a separator, or content."""
        form, text = self._form, self._pending.lstrip(SPACE + _CLOSING)
        if not text:
            return False
        if form.end and text.startswith(form.end):
            self._pending, self._state = text[len(form.end) :], self._after if form.begin else self._rest
            return True
        if form.end.startswith(text):
            return False
        dropped = self._pending[: len(self._pending) - len(text)]
        self._pending = dropped[len(dropped.rstrip(SPACE)) :] + text
        if not form.begin:
            item = text.lstrip(_BETWEEN)
            if not item:
                return False
            if item[0] in PAIRS:
                self._enter(len(self._pending) - len(item))
                return True
        self._state = self._content_or_rest()
        return True

    # --- reading of calls, character by character ---------------------------------------------------------------------

    def _region(self) -> Generator[None, str, None]:
        """A call, a list of calls, name and arguments, or a call as XML or as Python's."""
        c = yield from scan_space((yield))
        if self._form.tags is not None:
            yield from self._function(c, self._form.tags)
        elif self._form.around[0]:
            yield from self._named_calls(c)
        elif c == "[":
            c = yield from scan_space((yield))
            while c != "]":
                yield from self._python_call(c) if self._form.literals else self._item(c)
                c = yield from scan_space((yield))
                while c == "}":  # one too many
                    c = yield from scan_space((yield))
                if c == ",":
                    c = yield from scan_space((yield))
                elif c != "]":
                    raise NotACallError
        elif self._form.literals:
            yield from self._python_call(c)
        elif c == "{" or not self._form.short_ids:
            yield from self._item(c)
        else:
            yield from self._named(c)

    def _item(self, c: str) -> Generator[None, str, None]:
        """`{"name": ..., "arguments": {...}}`"""
        if c != "{":
            raise NotACallError
        self._begin_call()
        c = yield from scan_space((yield))
        while c != "}":
            c = yield from self._field(c)
            if c == ",":
                c = yield from scan_space((yield))
            elif c != "}":
                raise NotACallError
        if self._name is None:
            raise NotACallError
        if not self._complete:
            self._early = "{}"
            self._announce()
        self._end_call()

    def _field(self, c: str) -> Scan:
        """A key and its value."""
        key: list[str] = []
        c = yield from scan_string(c, key, None if self._form.begin else _KEYS)
        if c != ":":
            raise NotACallError
        c = yield from scan_space((yield))
        if key[0] in ("name", self._form.name_key):
            name: list[str] = []
            c = yield from scan_string(c, name, None if self._form.begin and self._marked else self._names)
            self._set_name(name[0])
            return c
        if key[0] in ("arguments", "parameters"):
            return (yield from self._arguments(c))
        if not (key[0] in _KEYS or self._form.begin):
            raise NotACallError
        return (yield from scan_value(c))

    def _named(self, c: str) -> Generator[None, str, None]:
        """`name[CALL_ID]...[ARGS]{...}`; all but name and arguments may be missing."""
        self._begin_call()
        name = ""
        while c not in "[{ \t\r\n":
            name += c
            c = yield
        c = yield from scan_space(c)
        while c == "[":
            while c not in "{ \t\r\n":  # markers, and the id that the model gave, which is not needed
                c = yield
            c = yield from scan_space(c)
        if not name or c != "{":
            raise NotACallError
        self._set_name(name)
        yield from self._object(c)
        self._end_call()

    def _named_calls(self, c: str) -> Generator[None, str, None]:
        """Names and arguments with a marker around each, up to the marker after all."""
        before, after = self._form.around
        while (yield from scan_one_of(c, before, self._form.end)) == before:
            self._begin_call()
            name = (yield from scan_up_to(self._form.args_marker)).strip()
            self._set_name(name.removeprefix("functions.").rpartition(":")[0] if self._form.numbered_ids else name)
            c = yield from scan_space((yield))
            if c != "{":
                raise NotACallError
            yield from self._object(c)
            self._end_call()
            while (c := (yield)) in SPACE + _CLOSING:  # brackets too many
                pass
            yield from scan_one_of(c, after)
            while (c := (yield)) in SPACE + _CLOSING:
                pass

    def _python_call(self, c: str) -> Generator[None, str, None]:
        """`name(key=value, ...)`, whose arguments are reported at its end."""
        self._begin_call()
        name, known = "", None if self._form.begin else self._names
        while c not in "( \t\r\n":
            name += c
            if known is not None and not any(other.startswith(name) for other in known):
                raise NotACallError
            c = yield
        if (yield from scan_space(c)) != "(":
            raise NotACallError
        text, depth = "", 0
        while (c := (yield)) != ")" or depth:
            text += c
            if c in "\"'":
                quote = c
                while (c := (yield)) != quote:
                    text += c
                    if c == "\\":
                        text += yield
                text += c
            depth += (c in "([{") - (c in ")]}")
        arguments = keywords_of(text)
        if arguments is None:
            raise NotACallError
        self._set_name(name)
        self._early = json.dumps(arguments, ensure_ascii=False)
        self._complete = True
        self._announce()
        self._end_call()

    def _arguments(self, c: str) -> Scan:
        """An object; text that holds one; or null."""
        if self._complete:
            raise NotACallError  # given twice
        if c == "{":
            yield from self._object(c)
            return (yield from scan_space((yield)))
        if c == '"':
            value: list[str] = []
            c = yield from scan_string(c, value)
            self._early = value[0] if _is_object(value[0]) else ""
        elif c == "n":
            c = yield from scan_value(c)
            self._early = "{}"
        if not self._early:
            raise NotACallError
        self._complete = True
        self._announce()
        return c

    def _object(self, c: str) -> Generator[None, str, None]:
        """An object whose text is passed on as it comes. Line breaks within strings are escaped, as JSON has them."""
        opened = c
        while (c := (yield)) in SPACE:
            opened += c
        if c not in '"}':
            raise NotACallError
        self._early = opened
        self._announce()
        expected = ["}"]
        while True:
            if c not in _OUTSIDE or (c in "}]" and expected.pop() != c):
                raise NotACallError
            self._argue(c)
            if c == '"':
                while (c := (yield)) != '"':
                    self._argue(c if c >= " " else json.dumps(c)[1:-1])
                    if c == "\\":
                        self._argue((yield))
                self._argue(c)
            elif c in PAIRS:
                expected.append(PAIRS[c])
            if not expected:
                break
            c = yield
        self._complete = True

    def _function(self, c: str, tags: CallTags) -> Generator[None, str, None]:
        """A call as XML, as `CallTags` has it; white space between tags is free, a key given again does not count."""
        self._begin_call()
        before, after, end = tags.function[0], tags.function[1].strip(), tags.end or self._form.end
        if before:
            yield from scan_one_of(c, before)
            name, c = (yield from scan_up_to(after)), " "
        else:  # the name ends with its line, or at a tag
            name = ""
            while c not in "\n<":
                name += c
                c = yield
        name = name.strip()
        self._set_name(name)
        self._early = "{"
        self._announce()
        root = self._schemas.get(name, {})
        properties, keys = properties_of(root), set[str]()
        while (yield from scan_one_of((yield from scan_space(c)), end, tags.key[0])) != end:
            key = yield from scan_up_to(tags.key[1].strip())
            if opening := tags.value[0].strip():
                yield from scan_one_of((yield from scan_space((yield))), opening)
            yield from self._parameter(key, tags, root, properties.get(key), again=key in keys)
            keys.add(key)
            c = yield
        self._argue("}")
        self._complete = True
        self._end_call()

    def _parameter(
        self, key: str, tags: CallTags, root: Schema, schema: Any, *, again: bool
    ) -> Generator[None, str, None]:
        """A value, reported with its key; not if the key is given `again`."""
        if again:
            yield from self._value(tags, lambda text: None)
            return
        types = types_of(schema, root)
        self._argue(f"{'' if self._first else ', '}{json.dumps(key, ensure_ascii=False)}: ")
        self._first = False
        if is_text(types):
            self._argue('"')
            yield from self._value(tags, lambda text: self._argue(json.dumps(text, ensure_ascii=False)[1:-1]))
            self._argue('"')
        else:
            written: list[str] = []
            yield from self._value(tags, written.append)
            self._argue(json_of("".join(written), types))

    def _value(self, tags: CallTags, take: Callable[[str], object]) -> Generator[None, str, None]:
        """Plain text up to the tag after it, given to `take` as it comes; where values stand in lines of their own a
        line break after and before the tags is not part of it.
        """
        end = tags.value[1]
        ends = {end, end.lstrip("\n")}
        buffer = yield
        if buffer == "\n" and tags.value[0].endswith("\n"):
            buffer = ""
        while buffer not in ends:
            while buffer and not any(text.startswith(buffer) for text in ends):
                take(buffer[0])
                buffer = buffer[1:]
            buffer += yield

    # --- the call at hand ---------------------------------------------------------------------------------------------

    def _begin_call(self) -> None:
        self._name, self._begun, self._complete, self._early = None, False, False, ""
        self._first = True  # no argument of XML yet

    def _set_name(self, name: str) -> None:
        marked = self._form.begin and self._marked
        if self._name is not None or not name or not (marked or name in self._names):
            raise NotACallError
        self._name = name
        if self._early:
            self._announce()

    def _announce(self) -> None:
        """Report the call, if its name is known too."""
        if self._name is not None and not self._begun:
            self._deltas.append(CallBegin(self._calls, self._form.new_id(self._name, self._calls), self._name))
            self._begun, self._raw = True, ""
            self._calls += 1
            early, self._early = self._early, ""
            self._argue(early)

    def _argue(self, text: str) -> None:
        if not self._begun:
            self._early += text
        elif text:
            self._deltas.append(ArgumentsDelta(self._calls - 1, text))

    def _end_call(self) -> None:
        self._after_call = True
        self.done = self._single
        self._begin_call()

    def _write(self, text: str) -> None:
        if self._calls and not self._written:
            text = text.lstrip(SPACE)
        if text:
            self._deltas.append(ContentDelta(text))
            self._written, self._after_call = True, False


def _begun(text: str, marker: str) -> int:
    """The number of characters at the end of a text that may be the beginning of a marker."""
    return next(n for n in range(min(max(len(marker) - 1, 0), len(text)), -1, -1) if text.endswith(marker[:n]))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
