"""Reads plain data from a pickle without calling anything that the pickle names.

A pickle is a program: Python's own reader imports and calls what it names. This reader knows only the instructions that
torch's metadata needs, looks every name up in the caller's table, and fills objects with the caller's functions. Its
memory is proportional to the size of the pickle, whatever the pickle says.
"""

import pickle
from collections.abc import Callable, Mapping, Set
from types import FunctionType
from typing import Any

PROTO, STOP, FRAME = pickle.PROTO[0], pickle.STOP[0], pickle.FRAME[0]
MARK, MEMOIZE, BINPUT, LONG_BINPUT = pickle.MARK[0], pickle.MEMOIZE[0], pickle.BINPUT[0], pickle.LONG_BINPUT[0]
BINGET, LONG_BINGET = pickle.BINGET[0], pickle.LONG_BINGET[0]
NONE, NEWTRUE, NEWFALSE = pickle.NONE[0], pickle.NEWTRUE[0], pickle.NEWFALSE[0]
BININT, BININT1, BININT2, LONG1 = pickle.BININT[0], pickle.BININT1[0], pickle.BININT2[0], pickle.LONG1[0]
BINUNICODE, SHORT_BINUNICODE = pickle.BINUNICODE[0], pickle.SHORT_BINUNICODE[0]
EMPTY_TUPLE, TUPLE, TUPLE1 = pickle.EMPTY_TUPLE[0], pickle.TUPLE[0], pickle.TUPLE1[0]
TUPLE2, TUPLE3 = pickle.TUPLE2[0], pickle.TUPLE3[0]
EMPTY_LIST, APPEND, APPENDS = pickle.EMPTY_LIST[0], pickle.APPEND[0], pickle.APPENDS[0]
EMPTY_DICT, SETITEM, SETITEMS = pickle.EMPTY_DICT[0], pickle.SETITEM[0], pickle.SETITEMS[0]
GLOBAL, STACK_GLOBAL = pickle.GLOBAL[0], pickle.STACK_GLOBAL[0]
REDUCE, NEWOBJ, BUILD = pickle.REDUCE[0], pickle.NEWOBJ[0], pickle.BUILD[0]


MOST_ARGUMENTS = 1000  # of a call: a long tuple used again and again would take unbounded time


class Refused(Exception):
    """The pickle has something that this reader does not read; the message says what."""


def read(
    data: bytes,
    names: Mapping[tuple[str, str], Any],
    fill: Mapping[type, Callable[[Any, Any], None]],
    keys: Set[type],
) -> Any:
    """The value that `data` holds.

    names: (module, name) -> its replacement: a function of the caller, called with the pickle's arguments; a class in
           `fill`; or a value.
    fill:  class -> function (new object, state) that gives the object its state, or raises.
    keys:  the classes that dict keys may have.

    Raises Refused for anything wrong.
    """
    try:
        return _run(data, names, fill, keys)
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"it is broken ({type(error).__name__}: {error})") from None


def _run(data: bytes, names: Mapping[tuple[str, str], Any], fill: Mapping[type, Any], keys: Set[type]) -> Any:
    at = 0
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []
    push, pop, remember = stack.append, stack.pop, memo.append

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    while True:  # the most frequent first: a checkpoint of thousands of ranks has millions of instructions
        op = data[at]
        at += 1
        if op == MEMOIZE:
            remember(stack[-1])
        elif op == LONG_BINGET:
            push(memo[int.from_bytes(data[at : at + 4], "little")])
            at += 4
        elif op == BINGET:
            push(memo[data[at]])
            at += 1
        elif op == BININT1:
            push(data[at])
            at += 1
        elif op == MARK:
            marks.append(len(stack))
        elif op == EMPTY_TUPLE:
            push(())
        elif op == NEWOBJ:
            arguments, cls = pop(), pop()
            if not isinstance(cls, type) or cls not in fill or type(arguments) is not tuple or arguments:
                raise Refused("it makes an object in a way that torch's metadata does not")
            push(object.__new__(cls))
        elif op == TUPLE1:
            stack[-1] = (stack[-1],)
        elif op == BUILD:
            state = pop()
            if type(stack[-1]) not in fill:
                raise Refused("it gives state to something other than an object of torch's metadata")
            fill[type(stack[-1])](stack[-1], state)
        elif op in (SETITEMS, SETITEM):
            items = since_mark() if op == SETITEMS else [stack.pop(-2), stack.pop()]
            if not {type(key) for key in items[::2]} <= keys or type(stack[-1]) is not dict:
                raise Refused("it has a dict with keys other than names and indices")
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif op == EMPTY_DICT:
            push({})
        elif op == REDUCE:
            arguments, function = pop(), pop()
            if not isinstance(function, FunctionType) or type(arguments) is not tuple:
                raise Refused("it calls something other than a function of torch's metadata")
            if len(arguments) > MOST_ARGUMENTS:
                raise Refused(f"it has a call with {len(arguments)} arguments")
            push(function(*arguments))
        elif op == TUPLE2:
            stack[-2:] = [(stack[-2], stack[-1])]
        elif op == BININT2:
            push(data[at] | data[at + 1] << 8)
            at += 2
        elif op == BININT:
            push(int.from_bytes(data[at : at + 4], "little", signed=True))
            at += 4
        elif op == SHORT_BINUNICODE:
            end = at + 1 + data[at]
            push(data[at + 1 : end].decode("utf-8", "surrogatepass"))
            at = end
        elif op == LONG1:
            end = at + 1 + data[at]
            push(int.from_bytes(data[at + 1 : end], "little", signed=True))
            at = end
        elif op == BINUNICODE:
            end = at + 4 + int.from_bytes(data[at : at + 4], "little")
            push(data[at + 4 : end].decode("utf-8", "surrogatepass"))
            at = end
        elif op in (NEWTRUE, NEWFALSE):
            push(op == NEWTRUE)
        elif op == NONE:
            push(None)
        elif op == TUPLE3:
            stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
        elif op == TUPLE:
            push(tuple(since_mark()))
        elif op == EMPTY_LIST:
            push([])
        elif op in (APPENDS, APPEND):
            items = since_mark() if op == APPENDS else [pop()]
            if type(stack[-1]) is not list:
                raise Refused("it appends to something other than a list")
            stack[-1].extend(items)
        elif op == STACK_GLOBAL:
            name, module = pop(), pop()
            push(_named(names, module, name))
        elif op == GLOBAL:
            middle = data.index(b"\n", at)
            end = data.index(b"\n", middle + 1)
            push(_named(names, data[at:middle].decode(), data[middle + 1 : end].decode()))
            at = end + 1
        elif op in (BINPUT, LONG_BINPUT):
            width = 1 if op == BINPUT else 4
            place = int.from_bytes(data[at : at + width], "little")
            at += width
            if place > len(memo):
                raise Refused("it numbers its values in another order than it has them")
            memo[place : place + 1] = [stack[-1]]
        elif op == FRAME:
            at += 8
        elif op == PROTO:
            at += 1
        elif op == STOP:
            return pop()
        else:
            raise Refused(f"it has the instruction {bytes([op])!r}, which torch's metadata does not need")


def _named(names: Mapping[tuple[str, str], Any], module: Any, name: Any) -> Any:
    if type(module) is not str or type(name) is not str:
        raise Refused("it names something with a value other than text")
    if (module, name) not in names:
        raise Refused(f"it names {f'{module}.{name}'[:80]!r}, which is not part of torch's metadata")
    return names[module, name]
