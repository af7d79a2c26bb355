"""Device profiles as TOML, bundled or the user's own, and the tables of measured collectives that they name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from attrs import evolve

from policylang.language.devices.profile import CollectiveTimes, DeviceProfile, Network, Rate, collective_kind
from policylang.language.devices.toml_text import KeyPlace, place_of, read_text, tables_of
from policylang.language.diagnostics import Diagnostic, Related, Source, Span, diagnose
from policylang.language.resources import devices_folder, manifest
from policylang.language.shown import did_you_mean, nearest, shortened
from policylang.language.units import ALIASES, DTYPES, UNITS

SUFFIX = ".toml"
_LONGEST = 200


def bundled_devices() -> tuple[str, ...]:
    """The names of the profiles that come along."""
    try:
        return tuple(sorted(entry.stem for entry in devices_folder().iterdir() if entry.suffix == SUFFIX))
    except OSError:
        return ()


def find_device(name: str, base: Path) -> tuple[Path, str] | Diagnostic:
    """The file of a profile, and its name for reports.

    A bare word is one of the library's, in full or as far as a dash; what has a slash or ends in ``.toml`` is a file.
    So neither ever stands for the other, whatever lies in the current folder. A bare word that the library does not
    have may be the name of a file.
    """
    if not name:
        return diagnose("APL152", "the name of a device profile is empty", help=_library())
    if os.path.basename(name) == name and not name.endswith(SUFFIX):
        word = name.lower()
        fitting = _fitting(word)
        if word in fitting or len(fitting) == 1:
            found = word if word in fitting else fitting[0]
            return devices_folder() / f"{found}{SUFFIX}", f"<{found}>"
        if fitting:
            quoted = " and ".join(f"`{each}`" for each in fitting)
            return diagnose("APL152", f"`{name}` is the beginning of several device profiles: {quoted}")
    path = base / name
    try:
        missing = not os.path.exists(path)
    except ValueError:
        missing = True
    return _unknown(name) if missing else (path, name)


def meant_devices(name: str) -> tuple[str, ...]:
    """The profiles that come along that a name may have been meant for: those that it begins, else those like it."""
    stem = os.path.basename(name).removesuffix(SUFFIX).lower()
    return _fitting(stem) or _nearest(stem) if stem else ()


def _fitting(word: str) -> tuple[str, ...]:
    return tuple(each for each in bundled_devices() if each == word or each.startswith(f"{word}-"))


def _unknown(name: str) -> Diagnostic:
    shown = shortened(name.partition("\n")[0], _LONGEST)
    stem = os.path.basename(name).removesuffix(SUFFIX).lower()
    if stem in bundled_devices():
        help = f"the bundled profile of that name is written `{stem}`"
        return diagnose("APL152", f"there is no device profile `{shown}`", help=help)
    near = did_you_mean(_nearest(stem))
    help = f"{near} {_library()}" if near else _library()
    return diagnose("APL152", f"there is no device profile `{shown}`", help=help)


def _nearest(word: str) -> tuple[str, ...]:
    """The profiles with a similar name or beginning of one: ``h10`` is near to ``h100``."""
    beginnings: dict[str, str] = {}
    for name in bundled_devices():
        parts = name.split("-")
        for length in range(1, len(parts) + 1):
            beginnings.setdefault("-".join(parts[:length]), name)
    return tuple(dict.fromkeys(beginnings[each] for each in nearest(word, beginnings)))[:2]


def _library() -> str:
    return f"bundled are {', '.join(bundled_devices())}; a file is given by its path"


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
    """The rows that a text holds, or the first thing that is wrong with it. The form is AutoParallel's::

        Group    Group Size  Collective                1MB (ms)    2MB (ms)
        -------  ----------  ----------------------  ----------  ----------
        0                64  all_gather_into_tensor        0.25        0.45

    A size is that of the tensor that one rank puts in; ``MB`` is 1024² bytes there.
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
            columns = [
                (float(at["size"]) * _BYTES_OF_UNIT[at["unit"]], _SECONDS[at["time"]]) for at in _COLUMN.finditer(line)
            ]
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
            return _wrong(f"`{times.collective}` of group `{group}` stands twice", span)
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


_TABLES = ("name", "compute", "memory", "operators", "host", "network")
_NETWORK = ("ranks", "bandwidth", "latency", "times", "group")
_SHARES_OF_COMPUTE = ("overhead", "attention", "convolution")
_MOST_OF_CONVOLUTIONS = 10.0
_LEAST_RATE, _MOST_RATE, _MOST_SIZE = 1.0, 1e30, 1e30
_LONGEST_TIME = 3600.0
_MOST_RANKS = 1 << 24
_MOST_BYTES = 1 << 60
_OPERATOR = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?", re.ASCII)
_BYTES = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([KMGT]?i?B)\s*")
_WITH_UNIT = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-zµ%]+)(?:/s)?\s*")
_PREFIXES = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_KINDS = {dict: "a table", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}

_Path = tuple[str | int, ...]
"""``("network", 1, "latency")``: the names and numbers that lead to a figure."""


def read_device(name: str | os.PathLike[str], base: Path | None = None) -> DeviceProfile | Diagnostic:
    """The profile of a name of the library or of a file, which is looked for from ``base`` on.

    ``name``: a bundled one's in full (``h100-sxm``) or as far as a dash (``h100``), or a path; what has a slash or ends
    in ``.toml`` is a path. A file with several mistakes gives the first, with the others as notes.
    """
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
    """The profile that a text makes; the tables that it names are looked for in ``folder``."""
    tables = tables_of(source, "APL154")
    if isinstance(tables, Diagnostic):
        return tables
    reader = _Reader(source, tables, folder)
    device = reader.device()
    return _first(reader.found) if reader.found else device


def _first(found: list[Diagnostic]) -> Diagnostic:
    """The first mistake in the order of the text, with the others as notes."""
    first, *others = sorted(found, key=lambda each: each.span.start if each.span else 0)
    notes = tuple(
        Related(f"besides, {each.message}{f' ({each.help})' if each.help else ''}", each.span) for each in others
    )
    return evolve(first, related=(*first.related, *notes))


class _Reader:
    """Reads the figures of one text; mistakes are gathered, and reading goes on without the figure."""

    def __init__(self, source: Source, tables: Mapping[str, Any], folder: Path) -> None:
        self.source, self.tables, self.folder = source, tables, folder
        self.found: list[Diagnostic] = []

    def device(self) -> DeviceProfile:
        self._refuse_unknown(self.tables, (), _TABLES)
        compute = self._table("compute", (*DTYPES, *ALIASES, *_SHARES_OF_COMPUTE, "tf32"), "`bfloat16 = 600e12`")
        memory = self._table("memory", ("bandwidth", "pointwise", "capacity"), "`bandwidth = 2.6e12`")
        return DeviceProfile(
            name=self._name(),
            compute=self._compute(compute),
            bandwidth=self._bandwidth(memory),
            pointwise=self._share(memory, "memory", "pointwise"),
            attention=self._share(compute, "compute", "attention"),
            convolution=self._share(compute, "compute", "convolution", _MOST_OF_CONVOLUTIONS),
            operators=self._operators(),
            overhead=self._seconds(compute or {}, ("compute", "overhead")),
            capacity=self._capacity(memory),
            host_bandwidth=self._host(self._table("host", ("bandwidth",))),
            networks=self._networks(),
        )

    # --- figures ---

    def _place(self, path: _Path) -> KeyPlace:
        names = [each for each in path if isinstance(each, str)]
        number = next((each for each in path if isinstance(each, int)), 0)
        return place_of(self.source, names[:1], names[1] if len(names) > 1 else None, number)

    def _wrong_key(self, path: _Path, message: str, help: str | None = None, code: str = "APL155") -> None:
        self.found.append(diagnose(code, message, self._place(path).key, help=help))

    def _wrong_value(self, path: _Path, message: str, help: str | None = None) -> None:
        self.found.append(diagnose("APL157", message, self._place(path).value, help=help))

    def _missing(self, name: str, path: _Path, help: str) -> None:
        self._wrong_key(path, f"`{name}` is missing", help, "APL156")

    def _table(self, name: str, known: Iterable[str], example: str = "") -> dict[str, Any] | None:
        """None where there is none; one with an ``example`` has to be there."""
        given = self.tables.get(name)
        if isinstance(given, dict):
            self._refuse_unknown(given, (name,), known)
            return given
        if given is not None:
            message = f"`{name}` is {_kind(given)}, and should be a table"
            self._wrong_key((name,), message, f"write `[{name}]`", "APL157")
        elif example:
            self._missing(f"[{name}]", (), f"write `[{name}]`, and below it {example}")
        return None

    def _refuse_unknown(self, given: Mapping[str, Any], path: _Path, known: Iterable[str]) -> None:
        known = tuple(known)
        where = f"in `[{path[0]}]`" if path else "in a device profile"
        for key in given:
            if key not in known:
                help = did_you_mean(nearest(key, known)) or f"there are {', '.join(f'`{each}`' for each in known)}"
                self._wrong_key((*path, key), f"`{_short(key)}` means nothing {where}", help)

    def _number(
        self, value: Any, path: _Path, least: float, most: float, what: str, *, above: bool = False
    ) -> float | None:
        """A figure between two others, itself above the least where ``above``; None where it is none."""
        name = _short(str(path[-1]))
        if not isinstance(value, int | float) or isinstance(value, bool):
            self._wrong_value(path, f"`{name}` is {_kind(value)}, and should be {what}", _plain_number(value))
        elif not least <= value <= most or (above and value == least):
            self._wrong_value(path, f"`{name} = {_shown(value)}` cannot be: it is {what}")
        else:
            return float(value)
        return None

    def _rate(self, value: Any, path: _Path, what: str) -> Rate | None:
        """A number, or points ``[size, per second]`` of rising size."""
        if not isinstance(value, list):
            constant = self._number(value, path, _LEAST_RATE, _MOST_RATE, f"a number of {what} per second")
            return None if constant is None else Rate.constant(constant)
        name = _short(str(path[-1]))
        points: list[tuple[float, float]] = []
        for point in value:
            if not isinstance(point, list) or len(point) != 2:
                help = f"a number, or points `[{what} of one, {what} per second]`: `[[1e9, 2e12], [1e12, 6e12]]`"
                self._wrong_value(path, f"`{name}` has {_kind(point)} that is not a size and a rate", help)
                return None
            size = self._number(point[0], path, _LEAST_RATE, _MOST_SIZE, f"a size, in {what}")
            rate = self._number(point[1], path, _LEAST_RATE, _MOST_RATE, f"a number of {what} per second")
            if size is None or rate is None:
                return None
            points.append((size, rate))
        if not points:
            self._wrong_value(path, f"`{name}` is an empty list", "write a number, or points")
            return None
        if any(low[0] >= high[0] for low, high in pairwise(points)):
            self._wrong_value(path, f"the sizes of `{name}` do not rise from point to point")
            return None
        return Rate(tuple(points))

    def _bytes_per_second(self, value: Any, path: _Path) -> float | None:
        return self._number(value, path, _LEAST_RATE, _MOST_RATE, "a number of bytes per second")

    def _seconds(self, table: Mapping[str, Any], path: _Path) -> float:
        given = table.get(str(path[-1]), 0.0)
        return self._number(given, path, 0.0, _LONGEST_TIME, "a number of seconds, from 0 to an hour") or 0.0

    def _share(self, table: Mapping[str, Any] | None, name: str, key: str, most: float = 1.0) -> float:
        what = f"a share, above 0 and at most {most:g}"
        share = self._number((table or {}).get(key, 1.0), (name, key), 0.0, most, what, above=True)
        return 1.0 if share is None else share

    # --- tables ---

    def _name(self) -> str:
        stem = Path(self.source.name).stem.strip("<>") or "device"
        name = self.tables.get("name", stem)
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > 100:
            self._wrong_value(("name",), "`name` should be a text of one line, of at most 100 characters")
            return stem
        return name

    def _compute(self, given: Mapping[str, Any] | None) -> dict[str, Rate]:
        rates: dict[str, Rate] = {}
        for key, value in (given or {}).items():
            path = ("compute", key)
            if key == "tf32":
                help = "products of float32 that run in TF32 are float32 ones: write their rate as `float32`"
                self._wrong_key(path, "`tf32` is no dtype of a tensor", help)
            dtype = ALIASES.get(key, key)
            if dtype not in DTYPES:
                continue
            rate = self._rate(value, path, "FLOP")
            if dtype in rates:
                self._wrong_key(path, f"`{key}` says the rate of {dtype} a second time")
            elif rate is not None:
                rates[dtype] = rate
        if given is not None and not any(ALIASES.get(key, key) in DTYPES for key in given):
            self._missing("compute", ("compute",), "name at least one dtype: `bfloat16 = 600e12`")
        return rates

    def _bandwidth(self, memory: Mapping[str, Any] | None) -> Rate:
        rate = None
        if memory is not None and "bandwidth" not in memory:
            self._missing("memory.bandwidth", ("memory",), "write `bandwidth = 2.6e12`, in bytes per second")
        elif memory is not None:
            rate = self._rate(memory["bandwidth"], ("memory", "bandwidth"), "bytes")
        return rate or Rate.constant(1.0)

    def _operators(self) -> dict[str, float]:
        """Rates by operator with its namespace; a bare name is of ``aten``."""
        given = self.tables.get("operators")
        given = self._table("operators", given if isinstance(given, dict) else ())
        rates: dict[str, float] = {}
        aten = manifest().namespaces["aten"]
        for key, value in (given or {}).items():
            path = ("operators", key)
            name = key.removeprefix("aten.")
            if not _OPERATOR.fullmatch(key) or ("." not in name and name not in aten):
                help = did_you_mean(nearest(name, aten)) or "`tanh`, or of another library `my_kernels.fused_norm`"
                self._wrong_key(path, f"`{_short(key)}` is no operator", help)
            elif (rate := self._bytes_per_second(value, path)) is not None:
                rates[name if "." in name else f"aten.{name}"] = rate
        return rates

    def _capacity(self, memory: Mapping[str, Any] | None) -> int | None:
        given, path = (memory or {}).get("capacity"), ("memory", "capacity")
        if given is None:
            return None
        what = "a number of bytes, as a text with its unit: `80 GiB`"
        if isinstance(given, str):
            match = _BYTES.fullmatch(given)
            if match is None or match[2] not in UNITS:
                help = 'write the number and its unit: `capacity = "80 GiB"`'
                self._wrong_value(path, f"`capacity` is not {what}", help)
                return None
            given = round(float(match[1]) * UNITS[match[2]][0])
        size = self._number(given, path, 1, _MOST_BYTES, what)
        return None if size is None else int(size)

    def _host(self, host: Mapping[str, Any] | None) -> float | None:
        if host is not None and "bandwidth" not in host:
            self._missing("host.bandwidth", ("host",), "write `bandwidth = 50e9`, in bytes per second each way")
        elif host is not None:
            return self._bytes_per_second(host["bandwidth"], ("host", "bandwidth"))
        return None

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
                message = f"no group ever comes to this network: one above it takes {which}"
                help = "the first entry that fits is taken: write the narrower ones first"
                self._wrong_key(("network", at), message, help)
        return tuple(networks)

    def _network(self, given: Mapping[str, Any], path: _Path) -> Network:
        self._refuse_unknown(given, path, _NETWORK)
        ranks, bandwidth = given.get("ranks"), given.get("bandwidth")
        if ranks is not None:
            what = "a whole number of ranks, from 2 on"
            number = self._number(ranks, (*path, "ranks"), 2, _MOST_RANKS, what)
            if number is not None and number != int(number):
                self._wrong_value((*path, "ranks"), f"`ranks = {ranks}` cannot be: it is {what}")
            ranks = None if number is None else int(number)
        if bandwidth is not None:
            bandwidth = self._bytes_per_second(bandwidth, (*path, "bandwidth"))
        if "bandwidth" not in given and "times" not in given:
            help = 'write `bandwidth = 45e9`, in bytes per second, or `times = "measured.table"`'
            self._missing("network.bandwidth", path, help)
        if "latency" in given and "bandwidth" not in given:
            message = "`latency` means nothing without `bandwidth`: measured times have it in them"
            self._wrong_key((*path, "latency"), message)
        if "group" in given and "times" not in given:
            message = "`group` means nothing without `times`: it says which rows of the table are meant"
            self._wrong_key((*path, "group"), message)
        latency = self._seconds(given, (*path, "latency"))
        return Network(ranks, bandwidth, latency, self._times(given, path))

    def _times(self, given: Mapping[str, Any], path: _Path) -> tuple[CollectiveTimes, ...]:
        file, group = given.get("times"), given.get("group")
        at_times, at_group = (*path, "times"), (*path, "group")
        if file is None:
            return ()
        if not isinstance(file, str) or not file:
            self._wrong_value(at_times, "`times` should be the path of a table")
            return ()
        if group is not None and not isinstance(group, str):
            help = f'write `group = "{group}"`' if isinstance(group, int) and 0 <= group < 10**9 else None
            self._wrong_value(at_group, "`group` should be a text", help)
            return ()
        rows = read_table(self.folder / file, file)
        if isinstance(rows, Diagnostic):
            named = self._place(at_times).value
            note = Related("the table is named here", named)
            self.found.append(evolve(rows, span=rows.span or named, related=(note,) if rows.span else ()))
            return ()
        groups = dict.fromkeys(name for name, _ in rows)
        if group is not None and group not in groups:
            help = did_you_mean(nearest(group, groups)) or f"there are {', '.join(f'`{each}`' for each in groups)}"
            self._wrong_value(at_group, f"the table has no group `{group}`", help)
            return ()
        times = [each for name, each in rows if group in (None, name)]
        measured: set[tuple[str, int]] = set()
        for each in times:
            if (each.collective, each.ranks) in measured:
                message = f"the table measures `{each.collective}` of {each.ranks} ranks in several groups"
                self._wrong_value(at_times, message, f'say which are meant: `group = "{next(iter(groups))}"`')
                return ()
            measured.add((each.collective, each.ranks))
        return tuple(times)


def _takes_all_of(first: Network, second: Network) -> bool:
    """True if the first prices all groups that the second fits. Groups inside 4 neighbouring ranks are inside 8."""
    if first.bandwidth is None:
        return False
    return first.ranks is None or (second.ranks is not None and first.ranks % second.ranks == 0)


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "a date or a time")


def _short(text: str) -> str:
    return shortened(text.replace("\n", " "), 60)


def _shown(value: float) -> str:
    try:
        return _short(str(value))
    except ValueError:  # Python writes no number of more than 4300 digits
        return "…"


def _plain_number(value: Any) -> str | None:
    """The help for somebody who wrote `2.6 TB/s`."""
    if not isinstance(value, str) or not (given := _WITH_UNIT.fullmatch(value)):
        return None
    number, unit = given.groups()
    scale = _TIMES.get(unit) or UNITS.get(unit, (None,))[0]
    for name in ("FLOPS", "FLOP", "B"):
        if unit.upper().endswith(name) and unit[: -len(name)] in _PREFIXES:
            scale = _PREFIXES[unit[: -len(name)]]
            break
    return None if scale is None else f"write the plain number: `{float(number) * scale:g}`"
