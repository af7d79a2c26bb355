"""Device profiles as TOML, bundled or the user's own, and the tables of measured collectives that they name."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from math import inf, isfinite
from pathlib import Path
from typing import Any, TypeVar

from attrs import evolve, frozen

from policylang.language.devices.profile import CollectiveTimes, DeviceProfile, Network, Rate, collective_kind
from policylang.language.diagnostics import Diagnostic, Related, Source, Span, diagnose
from policylang.language.files import decoded, read_limited
from policylang.language.resources import devices_folder, manifest
from policylang.language.shown import ALIASES, DTYPES, UNITS, did_you_mean, nearest, shortened

_MOST = 1 << 20
_LONGEST = 200
_AT = re.compile(r" \(at line (\d+), column (\d+)\)$| \(at end of document\)$")


def read_text(path: Path, name: str, noun: str) -> Source | Diagnostic:
    """The text of a file under the name that reports will give it. ``noun``: what the file should be."""
    shown = shortened(name, _LONGEST)
    content = read_limited(path, shown, _MOST, "APL153", f"name the file of {noun}")
    if isinstance(content, Diagnostic):
        return content
    if len(content) > _MOST:
        message = f"the file is larger than the 1 MiB that {noun} may have"
        return diagnose("APL153", message, Span(Source(shown, ""), 0, 0))
    return decoded(content, shown, "APL153", noun)


def tables_of(source: Source, code: str) -> dict[str, Any] | Diagnostic:
    """Parse a TOML text; a diagnostic of this code where it is none."""
    try:
        return tomllib.loads(source.text)
    except RecursionError:
        return diagnose(code, "the file nests lists or tables too deep", Span(source, 0, 0))
    except ValueError as error:  # tomllib's own error is one, and so is a number of more digits than Python reads
        message = str(error)
    start, at = 0, _AT.search(message)
    if at is not None:
        message = message[: at.start()]
        start = len(source.text)
        if at[1]:
            lines = source.text.split("\n")
            start = sum(len(line) + 1 for line in lines[: int(at[1]) - 1]) + int(at[2]) - 1
    if "digits" in message:
        message = "a number has too many digits"
    return diagnose(code, f"the file is not TOML: {message[:1].lower()}{message[1:]}", Span(source, start, start))


@frozen
class KeyPlace:
    """A key in a text, and its value to the end of its line; of a table with a header, both are the header."""

    key: Span
    value: Span


def place_of(source: Source, table: Sequence[str], key: str | None = None, number: int = 0) -> KeyPlace:
    """Find a key by its name on the lines below its table's header; the header, or the start of the
    text, where it is not found. ``number``: which of the tables of one name."""

    def pattern(name: str) -> str:
        return rf"[\"']?{re.escape(name)}[\"']?"  # in quotes or not

    header = Span(source, 0, 0)
    if table:
        name = r"[ \t]*\.[ \t]*".join(map(pattern, table))
        headers = list(re.finditer(rf"^[ \t]*(\[\[?[ \t]*{name}[ \t]*\]\]?)", source.text, re.MULTILINE))
        if number >= len(headers):
            return place_of(source, table[:-1], table[-1])
        header = Span(source, *headers[number].span(1))
    if key is not None:
        line = re.compile(rf"^[ \t]*({pattern(key)})[ \t]*=[ \t]*((?:[^\n#]*[^\s#])?)", re.MULTILINE)
        if (found := line.search(source.text, header.end)) is not None:
            return KeyPlace(Span(source, *found.span(1)), Span(source, *found.span(2)))
    return KeyPlace(header, header)


SUFFIX = ".toml"
_LONGEST_NAME = 200


def bundled_devices() -> tuple[str, ...]:
    """The names of the profiles that come along."""
    try:
        return tuple(sorted(entry.stem for entry in devices_folder().iterdir() if entry.suffix == SUFFIX))
    except OSError:
        return ()


def find_device(name: str, base: Path) -> tuple[Path, str] | Diagnostic:
    """The file of a profile, and its name for reports. A bare word is a library profile, in full or up to a dash; a
    name with a slash or ending in ``.toml`` is a file. So neither hides the other, whatever is in the current folder. A
    bare word that the library lacks may be the name of a file."""
    library = f"bundled are {', '.join(bundled_devices())}; a file is given by its path"
    if not name:
        return diagnose("APL152", "the name of a device profile is empty", help=library)
    if os.path.basename(name) == name and not name.endswith(SUFFIX):
        fitting = _fitting(name.lower())
        if len(fitting) == 1 or name.lower() in fitting:
            found = name.lower() if name.lower() in fitting else fitting[0]
            return devices_folder() / f"{found}{SUFFIX}", f"<{found}>"
        if fitting:
            quoted = " and ".join(f"`{each}`" for each in fitting)
            return diagnose("APL152", f"`{name}` is the beginning of several device profiles: {quoted}")
    if os.path.exists(base / name):
        return base / name, name
    stem = os.path.basename(name).removesuffix(SUFFIX).lower()
    help = " ".join(filter(None, (did_you_mean(_nearest(stem)), library)))
    if stem in bundled_devices():
        help = f"the bundled profile of that name is written `{stem}`"
    shown = shortened(name.partition("\n")[0], _LONGEST_NAME)
    return diagnose("APL152", f"there is no device profile `{shown}`", help=help)


def meant_devices(name: str) -> tuple[str, ...]:
    """The profiles that come along that a name may have been meant for: those that it begins, else those like it."""
    stem = os.path.basename(name).removesuffix(SUFFIX).lower()
    return _fitting(stem) or _nearest(stem) if stem else ()


def _fitting(word: str) -> tuple[str, ...]:
    return tuple(each for each in bundled_devices() if each == word or each.startswith(f"{word}-"))


def _nearest(word: str) -> tuple[str, ...]:
    """The profiles with a similar name or beginning of one: ``h10`` is near to ``h100``."""
    beginnings: dict[str, str] = {}
    for name in bundled_devices():
        for beginning in accumulate(name.split("-"), "{}-{}".format):
            beginnings.setdefault(beginning, name)
    return tuple(dict.fromkeys(beginnings[each] for each in nearest(word, beginnings)))[:2]


_COLUMN = re.compile(r"(?P<size>\d{1,12}(?:\.\d{1,9})?)\s*(?P<unit>[KMGT]?)i?B\s*\((?P<time>ns|us|µs|ms|s)\)")
_WORD = re.compile(r"\S+")
_RULE = re.compile(r"[\s|:+=-]+")
_BYTES_OF_UNIT = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_LONGEST_COLLECTIVE = 1e6

Row = tuple[str, CollectiveTimes]
"""The name of a group, and what was measured there."""


def read_table(path: Path, name: str) -> tuple[Row, ...] | Diagnostic:
    """The rows of a table in the order of the file."""
    source = read_text(path, name, "a table of collective times")
    return source if isinstance(source, Diagnostic) else table_rows(source)


def table_rows(source: Source) -> tuple[Row, ...] | Diagnostic:
    """The rows of a text, or its first error. The form is AutoParallel's::

        Group    Group Size  Collective                1MB (ms)    2MB (ms)
        -------  ----------  ----------------------  ----------  ----------
        0                64  all_gather_into_tensor        0.25        0.45

    A size is that of one rank's input tensor; ``MB`` is 1024² bytes there.
    """
    columns: list[tuple[float, float]] = []  # bytes, and the seconds of one unit
    rows: dict[tuple[str, int, str], CollectiveTimes] = {}
    start = 0
    for line in source.text.splitlines(keepends=True):
        span = Span(source, start, start + len(line.rstrip()))
        start += len(line)
        if _RULE.fullmatch(line) or line.lstrip().startswith("#"):
            continue
        if not columns:
            found = _COLUMN.finditer(line)
            columns = [(float(at["size"]) * _BYTES_OF_UNIT[at["unit"]], _SECONDS[at["time"]]) for at in found]
            if not columns:
                if "Collective" not in line:  # no table at all, and perhaps nobody's to be shown
                    span = Span(Source(source.name, ""), 0, 0)
                example = "for example `Group  Group Size  Collective  1MB (ms)`"
                return _wrong("the first line names no sizes", span, example)
            sizes = [size for size, _ in columns]
            if sizes[0] <= 0 or any(low >= high for low, high in pairwise(sizes)):
                return _wrong("the sizes do not rise from column to column", span)
            continue
        row = _row(source, span, columns)
        if isinstance(row, Diagnostic):
            return row
        group, times = row
        key = (group, times.ranks, times.collective)
        if key in rows:
            return _wrong(f"`{times.collective}` of group `{group}` is there twice", span)
        rows[key] = times
    if not rows:
        return _wrong("the table has no rows", Span(source, 0, 0))
    return tuple((group, times) for (group, _, _), times in rows.items())


def _row(source: Source, span: Span, columns: list[tuple[float, float]]) -> Row | Diagnostic:
    words = [Span(source, span.start + at.start(), span.start + at.end()) for at in _WORD.finditer(span.text)]
    if len(words) != 3 + len(columns):
        found = f"{len(words)} words, and {3 + len(columns)} are wanted"
        return _wrong(f"the row has {found}", span, "a group, its size, a collective and a time for each size")
    group, size, collective, *figures = words
    if not re.fullmatch(r"[0-9]{1,9}", size.text) or int(size.text) < 1:
        return _wrong(f"`{size.text}` is not the size of a group", size)
    if collective_kind(collective.text) is None:
        return _wrong(f"`{collective.text}` is no collective", collective)
    points = []
    for (much, unit), figure in zip(columns, figures, strict=True):
        try:
            seconds = float(figure.text) * unit
        except ValueError:
            return _wrong(f"`{figure.text}` is not a number", figure)
        if not (isfinite(seconds) and 0 < seconds <= _LONGEST_COLLECTIVE):
            return _wrong(f"`{figure.text}` is not the time of a collective", figure)
        points.append((much, seconds))
    return group.text, CollectiveTimes(collective.text, int(size.text), tuple(points))


def _wrong(message: str, span: Span, help: str | None = None) -> Diagnostic:
    return diagnose("APL158", message, span, help=help)


_OPERATOR = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?", re.ASCII)
_BYTES = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([KMGT]?i?B)\s*")
_WITH_UNIT = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-zµ%]+)(?:/s)?\s*")
_PREFIXES = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_KINDS = {dict: "a table", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}

_Path = tuple[str | int, ...]  # `("network", 1, "latency")`: the names and numbers that lead to a figure


_T = TypeVar("_T")
_U = TypeVar("_U")
_Figure = Callable[[Any, str], _T]  # reads what a key, of this name, is given; raises :class:`_Misread`


class _Misread(Exception):
    """A value is none of the kind wanted: a message, a help, and the key beside it that is wrong, if it is that one."""

    def __init__(self, message: str, help: str | None = None, key: str | None = None) -> None:
        super().__init__(message)
        self.message, self.help, self.key = message, help, key


def _number(what: str, least: float, most: float, *, above: bool = False) -> _Figure[float]:
    """Reads a number between two others. ``above``: the least is too little itself."""

    def read(value: Any, name: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise _Misread(f"`{name}` is {kind_of(value)}, and should be {what}", _plain_number(value))
        if least <= value <= most and not (above and value == least):
            return float(value)
        try:
            shown = _short(str(value))
        except ValueError:  # Python writes no number of more than 4300 digits
            shown = "…"
        raise _Misread(f"`{name} = {shown}` cannot be: it is {what}")

    return read


def _share(most: float) -> _Figure[float]:
    return _number(f"a share, above 0 and at most {most:g}", 0.0, most, above=True)


def _per_second(what: str) -> _Figure[float]:
    return _number(f"a number of {what} per second", 1.0, 1e30)


def _rate(what: str) -> _Figure[Rate]:
    """Reads a number, or points ``[size, per second]`` of rising size."""
    per_second, size = _per_second(what), _number(f"a size, in {what}", 1.0, 1e30)

    def read(value: Any, name: str) -> Rate:
        if not isinstance(value, list):
            return Rate.constant(per_second(value, name))
        points: list[tuple[float, float]] = []
        for point in value:
            if not isinstance(point, list) or len(point) != 2:
                help = f"a number, or points `[{what} of one, {what} per second]`: `[[1e9, 2e12], [1e12, 6e12]]`"
                raise _Misread(f"`{name}` has {kind_of(point)} that is not a size and a rate", help)
            points.append((size(point[0], name), per_second(point[1], name)))
        if not points:
            raise _Misread(f"`{name}` is an empty list", "write a number, or points")
        if any(low[0] >= high[0] for low, high in pairwise(points)):
            raise _Misread(f"the sizes of `{name}` do not rise from point to point")
        return Rate(tuple(points))

    return read


def _capacity(value: Any, name: str) -> int:
    what = "a number of bytes, as a text with its unit: `80 GiB`"
    if isinstance(value, str):
        match = _BYTES.fullmatch(value)
        if match is None or match[2] not in UNITS:
            raise _Misread(f"`{name}` is not {what}", 'write the number and its unit: `capacity = "80 GiB"`')
        value = round(float(match[1]) * UNITS[match[2]][0])
    return int(_number(what, 1, 1 << 60)(value, name))


def _ranks(value: Any, name: str) -> int:
    what = "a whole number of ranks, from 2 on"
    number = _number(what, 2, 1 << 24)(value, name)
    if number != int(number):
        raise _Misread(f"`{name} = {value}` cannot be: it is {what}")
    return int(number)


def _name(value: Any, _: str) -> str:
    if isinstance(value, str) and value.strip() and value.isprintable() and len(value) <= 100:
        return value
    raise _Misread("`name` should be a text of one line, of at most 100 characters")


_SECONDS_OF_ONE = _number("a number of seconds, from 0 to an hour", 0.0, 3600.0)
_BANDWIDTH = _per_second("bytes")


def read_device(name: str | os.PathLike[str], base: Path | None = None) -> DeviceProfile | Diagnostic:
    """The profile of a name of the library or of a file, which is looked for from ``base`` on. ``name``: a bundled
    one's in full (``h100-sxm``) or as far as a dash (``h100``), or a path; what has a slash or ends in ``.toml`` is a
    path. A file with several mistakes gives the first, with the others as notes."""
    if not isinstance(name, str | os.PathLike):
        message = f"a device is given by its name or the path of its profile, and this is a `{type(name).__name__}`"
        return diagnose("APL152", message)
    path = os.fsdecode(name)
    if not isinstance(name, str) and os.path.basename(path) == path:
        path = os.path.join(os.curdir, path)
    found = find_device(path, base or Path())
    if isinstance(found, Diagnostic):
        return found
    file, shown = found
    source = read_text(file, shown, "a device profile")
    if isinstance(source, Diagnostic):
        return source
    device = parse_device(source, file.parent)
    if isinstance(device, Diagnostic) and file.resolve().suffix != SUFFIX:
        # Perhaps no profile at all: a policy may name any file, whose lines are nobody's to be shown.
        return diagnose(device.code, f"`{shown}` is no device profile: {device.message}", help=device.help)
    return device


def parse_device(source: Source, folder: Path) -> DeviceProfile | Diagnostic:
    """The profile, or the first mistake, with the others as notes. Tables that it names are sought in ``folder``."""
    tables = tables_of(source, "APL154")
    if isinstance(tables, Diagnostic):
        return tables
    reader = _Reader(source, tables, folder)
    device = reader.device()
    if not reader.found:
        return device
    first, *others = sorted(reader.found, key=lambda each: each.span.start if each.span else 0)
    notes = (Related(f"besides, {each.message}{f' ({each.help})' if each.help else ''}", each.span) for each in others)
    return evolve(first, related=(*first.related, *notes))


class _Reader:
    """Reads the figures of one text; mistakes are gathered, and reading goes on without the figure."""

    def __init__(self, source: Source, tables: Mapping[str, Any], folder: Path) -> None:
        self.source, self.tables, self.folder = source, tables, folder
        self.found: list[Diagnostic] = []

    def device(self) -> DeviceProfile:
        self._refuse_unknown(self.tables, (), ("name", "compute", "memory", "operators", "host", "network"))
        shares = ("overhead", "attention", "convolution")
        compute = self._table("compute", (*DTYPES, *ALIASES, *shares, "tf32"), "`bfloat16 = 600e12`")
        memory = self._table("memory", ("bandwidth", "pointwise", "capacity"), "`bandwidth = 2.6e12`")
        if memory is not None and "bandwidth" not in memory:
            self._missing("memory.bandwidth", ("memory",), "write `bandwidth = 2.6e12`, in bytes per second")
        host = self._table("host", ("bandwidth", "ranks", "together"))
        if host is not None and "bandwidth" not in host:
            self._missing("host.bandwidth", ("host",), "write `bandwidth = 50e9`, in bytes per second per direction")
        bandwidth = self._read(host, ("host", "bandwidth"), _BANDWIDTH, None)
        ranks = self._read(host, ("host", "ranks"), _ranks, None)
        together = self._read(host, ("host", "together"), _BANDWIDTH, inf)
        if host is not None and "together" in host and "ranks" not in host:
            self._missing("host.ranks", ("host", "together"), "write `ranks = 8`, the ranks that share a host")
        return DeviceProfile(
            name=self._read(self.tables, ("name",), _name, Path(self.source.name).stem.strip("<>") or "device"),
            compute=self._compute(compute),
            bandwidth=self._read(memory, ("memory", "bandwidth"), _rate("bytes"), Rate.constant(1.0)),
            pointwise=self._read(memory, ("memory", "pointwise"), _share(1.0), 1.0),
            attention=self._read(compute, ("compute", "attention"), _share(1.0), 1.0),
            convolution=self._read(compute, ("compute", "convolution"), _share(10.0), 1.0),
            operators=self._operators(),
            overhead=self._read(compute, ("compute", "overhead"), _SECONDS_OF_ONE, 0.0),
            capacity=self._read(memory, ("memory", "capacity"), _capacity, None),
            host_bandwidth=bandwidth and min(bandwidth, together / (ranks or 1)),
            host_ranks=ranks,
            networks=self._networks(),
        )

    # --- mistakes ---

    def _place(self, path: _Path) -> KeyPlace:
        names = [each for each in path if isinstance(each, str)]
        number = next((each for each in path if isinstance(each, int)), 0)
        return place_of(self.source, names[:1], names[1] if len(names) > 1 else None, number)

    def _wrong_key(self, path: _Path, message: str, help: str | None = None, code: str = "APL155") -> None:
        self.found.append(diagnose(code, message, self._place(path).key, help=help))

    def _missing(self, name: str, path: _Path, help: str) -> None:
        self._wrong_key(path, f"`{name}` is missing", help, "APL156")

    def _refuse_unknown(self, given: Mapping[str, Any], path: _Path, known: Sequence[str]) -> None:
        where = f"in `[{path[0]}]`" if path else "in a device profile"
        for key in given:
            if key not in known:
                self._wrong_key((*path, key), f"`{_short(key)}` means nothing {where}", one_of(key, known))

    # --- tables ---

    def _read(self, table: Mapping[str, Any] | None, path: _Path, figure: _Figure[_T], otherwise: _U) -> _T | _U:
        key = str(path[-1])
        if table is None or key not in table:
            return otherwise
        try:
            return figure(table[key], _short(key))
        except _Misread as wrong:
            place = self._place(path if wrong.key is None else (*path[:-1], wrong.key))
            self.found.append(diagnose("APL157", wrong.message, place.value, help=wrong.help))
            return otherwise

    def _table(self, name: str, known: Sequence[str] | None, example: str = "") -> dict[str, Any] | None:
        """None where there is none; one with an ``example`` has to be there. ``known``: its keys, or None for any."""
        given = self.tables.get(name)
        if isinstance(given, dict):
            self._refuse_unknown(given, (name,), known or tuple(given))
            return given
        if given is not None:
            message = f"`{name}` is {kind_of(given)}, and should be a table"
            self._wrong_key((name,), message, f"write `[{name}]`", "APL157")
        elif example:
            self._missing(f"[{name}]", (), f"write `[{name}]`, and below it {example}")
        return None

    def _compute(self, given: Mapping[str, Any] | None) -> dict[str, Rate]:
        rates: dict[str, Rate] = {}
        for key in given or ():
            path = ("compute", key)
            if key == "tf32":
                help = "products of float32 that run in TF32 are float32 ones: write their rate as `float32`"
                self._wrong_key(path, "`tf32` is no dtype of a tensor", help)
            dtype = ALIASES.get(key, key)
            if dtype not in DTYPES:
                continue
            rate = self._read(given, path, _rate("FLOP"), None)
            if dtype in rates:
                self._wrong_key(path, f"`{key}` gives the rate of {dtype} a second time")
            elif rate is not None:
                rates[dtype] = rate
        if given is not None and not any(ALIASES.get(key, key) in DTYPES for key in given):
            self._missing("compute", ("compute",), "name at least one dtype: `bfloat16 = 600e12`")
        return rates

    def _operators(self) -> dict[str, float]:
        """Rates by operator with its namespace; a bare name is of ``aten``."""
        given = self._table("operators", None)
        rates: dict[str, float] = {}
        aten = manifest().namespaces["aten"]
        for key in given or ():
            path = ("operators", key)
            name = key.removeprefix("aten.")
            if not _OPERATOR.fullmatch(key) or ("." not in name and name not in aten):
                help = did_you_mean(nearest(name, aten)) or "`tanh`, or of another library `my_kernels.fused_norm`"
                self._wrong_key(path, f"`{_short(key)}` is no operator", help)
            elif (rate := self._read(given, path, _BANDWIDTH, None)) is not None:
                rates[name if "." in name else f"aten.{name}"] = rate
        return rates

    def _networks(self) -> tuple[Network, ...]:
        given = self.tables.get("network", [])
        if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
            help = "write `[[network]]`, with two brackets, for each"
            self._wrong_key(("network",), "`network` should be a list of tables", help, "APL157")
            return ()
        networks = [self._network(each, ("network", at)) for at, each in enumerate(given)]
        for at, network in enumerate(networks):
            if before := next((other for other in networks[:at] if _takes_all_of(other, network)), None):
                which = "groups of any ranks" if before.ranks is None else f"groups inside {before.ranks} ranks"
                message = f"no group ever uses this network: one above it takes {which}"
                help = "the first entry that fits is taken: write the narrower ones first"
                self._wrong_key(("network", at), message, help)
        return tuple(networks)

    def _network(self, given: Mapping[str, Any], path: _Path) -> Network:
        self._refuse_unknown(given, path, ("ranks", "bandwidth", "latency", "times", "group"))
        if "bandwidth" not in given and "times" not in given:
            help = 'write `bandwidth = 45e9`, in bytes per second, or `times = "measured.table"`'
            self._missing("network.bandwidth", path, help)
        for key, other, why in (
            ("latency", "bandwidth", "measured times have it in them"),
            ("group", "times", "it selects rows of the table"),
        ):
            if key in given and other not in given:
                self._wrong_key((*path, key), f"`{key}` means nothing without `{other}`: {why}")
        return Network(
            self._read(given, (*path, "ranks"), _ranks, None),
            self._read(given, (*path, "bandwidth"), _BANDWIDTH, None),
            self._read(given, (*path, "latency"), _SECONDS_OF_ONE, 0.0),
            self._read(given, (*path, "times"), lambda file, _: self._times(file, given.get("group"), path), ()),
        )

    def _times(self, file: Any, group: Any, path: _Path) -> tuple[CollectiveTimes, ...]:
        if not isinstance(file, str) or not file:
            raise _Misread("`times` should be the path of a table")
        if group is not None and not isinstance(group, str):
            help = f'write `group = "{group}"`' if isinstance(group, int) and 0 <= group < 10**9 else None
            raise _Misread("`group` should be a text", help, "group")
        rows = read_table(self.folder / file, file)
        if isinstance(rows, Diagnostic):
            named = self._place((*path, "times")).value
            note = Related("the table is named here", named)
            self.found.append(evolve(rows, span=rows.span or named, related=(note,) if rows.span else ()))
            return ()
        groups = dict.fromkeys(name for name, _ in rows)
        if group is not None and group not in groups:
            raise _Misread(f"the table has no group `{group}`", one_of(group, groups), "group")
        times: dict[tuple[str, int], CollectiveTimes] = {}
        for name, each in rows:
            if group in (None, name) and times.setdefault((each.collective, each.ranks), each) is not each:
                message = f"the table measures `{each.collective}` of {each.ranks} ranks in several groups"
                raise _Misread(message, f'choose one: `group = "{next(iter(groups))}"`')
        return tuple(times.values())


def _takes_all_of(first: Network, second: Network) -> bool:
    """True if the first prices all groups that the second fits. Groups inside 4 neighbouring ranks are inside 8."""
    if first.bandwidth is None:
        return False
    return first.ranks is None or (second.ranks is not None and first.ranks % second.ranks == 0)


def kind_of(value: object) -> str:
    return _KINDS.get(type(value), "a date or a time")


def one_of(word: str, known: Collection[str]) -> str:
    """The help for a word that should be one of some others."""
    return did_you_mean(nearest(word, known)) or f"there are {', '.join(f'`{each}`' for each in known)}"


def _short(text: str) -> str:
    return shortened(text.replace("\n", " "), 60)


def _plain_number(value: Any) -> str | None:
    """The help for somebody who wrote `2.6 TB/s`."""
    if not isinstance(value, str) or not (given := _WITH_UNIT.fullmatch(value)):
        return None
    number, unit = given.groups()
    scale = _SECONDS.get(unit) or UNITS.get(unit, (None,))[0]
    for name in ("FLOPS", "FLOP", "B"):
        if unit.upper().endswith(name) and unit[: -len(name)] in _PREFIXES:
            scale = _PREFIXES[unit[: -len(name)]]
            break
    return None if scale is None else f"write the plain number: `{float(number) * scale:g}`"
