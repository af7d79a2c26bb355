"""Device profiles as TOML, bundled or the user's own, read with everything that is wrong with them."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from attrs import evolve

from policylang.language.devices.checked_tables import LEAST_RATE, MOST_RATE, CheckedTables
from policylang.language.devices.collective_table import read_table
from policylang.language.devices.lookup import SUFFIX, find_device
from policylang.language.devices.positions import misread
from policylang.language.devices.profile import CollectiveTimes, DeviceProfile, Network, Rate
from policylang.language.devices.text_file import read_text
from policylang.language.diagnostics import Diagnostic, Related, Source, Span, diagnose
from policylang.language.resources import manifest
from policylang.language.units import ALIASES, DTYPES, UNITS
from policylang.language.wording import did_you_mean, nearest, shortened

_TABLES = ("name", "compute", "memory", "operators", "host", "network")
_NETWORK = ("ranks", "bandwidth", "latency", "times", "group")
_SHARES_OF_COMPUTE = ("overhead", "attention", "convolution")
_MOST_OF_CONVOLUTIONS = 10.0
_OPERATOR = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?", re.ASCII)
_LONGEST_TIME = 3600.0
_MOST_RANKS = 1 << 24
_MOST_BYTES = 1 << 60
_BYTES = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([KMGT]?i?B)\s*")


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
    try:
        found = tomllib.loads(source.text)
    except RecursionError:
        return diagnose("APL154", "the file nests lists or tables too deep", Span(source, 0, 0))
    except ValueError as error:  # tomllib's own error is one, and so is a number of more digits than Python reads
        message, span = misread(str(error), source)
        return diagnose("APL154", f"the file is not TOML: {message}", span)
    reader = _Reader(CheckedTables(source), found, folder)
    device = reader.device()
    return device if device is not None else _first(reader.tables.found)


def _first(found: list[Diagnostic]) -> Diagnostic:
    """The first mistake in the order of the text, with the others as notes."""
    first, *others = sorted(found, key=lambda each: each.span.start if each.span else 0)
    notes = tuple(
        Related(f"besides, {each.message}{f' ({each.help})' if each.help else ''}", each.span) for each in others
    )
    return evolve(first, related=(*first.related, *notes))


class _Reader:
    def __init__(self, tables: CheckedTables, found: dict[str, Any], folder: Path) -> None:
        self.tables = tables
        self.found = found
        self.folder = folder

    def device(self) -> DeviceProfile | None:
        """None where anything is wrong."""
        tables, found = self.tables, self.found
        tables.unknown(found, (), _TABLES)
        compute = tables.table(found, ("compute",), (*DTYPES, *ALIASES, *_SHARES_OF_COMPUTE, "tf32"))
        memory = tables.table(found, ("memory",), ("bandwidth", "pointwise", "capacity"))
        host = tables.table(found, ("host",), ("bandwidth",))
        for name, each, example in (
            ("compute", compute, "write `[compute]`, and below it `bfloat16 = 600e12`"),
            ("memory", memory, "write `[memory]`, and below it `bandwidth = 2.6e12`"),
        ):
            if each is None and name not in found:
                tables.missing(f"[{name}]", (), example)
        rates = self._compute(compute or {}, bool(compute is not None))
        bandwidth = self._bandwidth(memory) if memory is not None else None
        device = DeviceProfile(
            name=self._name(),
            compute=rates,
            bandwidth=bandwidth or Rate.constant(1.0),
            pointwise=self._share(memory or {}, ("memory", "pointwise")),
            attention=self._share(compute or {}, ("compute", "attention")),
            convolution=self._share(compute or {}, ("compute", "convolution"), _MOST_OF_CONVOLUTIONS),
            operators=self._operators(),
            overhead=self._seconds(compute or {}, ("compute", "overhead")),
            capacity=self._capacity(memory or {}),
            host_bandwidth=self._host(host),
            networks=self._networks(),
        )
        return None if tables.found else device

    def _name(self) -> str:
        stem = Path(self.tables.source.name).stem.strip("<>") or "device"
        name = self.found.get("name", stem)
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > 100:
            message = "`name` should be a text of one line, of at most 100 characters"
            self.tables.wrong("APL157", message, self.tables.value(("name",)))
            return stem
        return name

    def _compute(self, given: dict[str, Any], is_there: bool) -> dict[str, Rate]:
        rates: dict[str, Rate] = {}
        tables = self.tables
        for key, value in given.items():
            path = ("compute", key)
            if key == "tf32":
                help = "products of float32 that run in TF32 are float32 ones: write their rate as `float32`"
                tables.wrong("APL155", "`tf32` is no dtype of a tensor", tables.key(path), help)
                continue
            dtype = ALIASES.get(key, key)
            if dtype not in DTYPES:
                continue
            rate = tables.rate(value, path, "FLOP")
            if dtype in rates:
                tables.wrong("APL155", f"`{key}` says the rate of {dtype} a second time", tables.key(path))
            elif rate is not None:
                rates[dtype] = rate
        if is_there and not any(ALIASES.get(key, key) in DTYPES for key in given):
            tables.missing("compute", ("compute",), "name at least one dtype: `bfloat16 = 600e12`")
        return rates

    def _bandwidth(self, memory: dict[str, Any]) -> Rate | None:
        if "bandwidth" not in memory:
            self.tables.missing("memory.bandwidth", ("memory",), "write `bandwidth = 2.6e12`, in bytes per second")
            return None
        return self.tables.rate(memory["bandwidth"], ("memory", "bandwidth"), "bytes")

    def _share(self, table: dict[str, Any], path: tuple[str, str], most: float = 1.0) -> float:
        given = table.get(path[-1], 1.0)
        share = self.tables.number(given, path, 0.0, most, f"a share, above 0 and at most {most:g}", above=True)
        return 1.0 if share is None else share

    def _operators(self) -> dict[str, float]:
        """By their names with namespace; a bare one is of ``aten``."""
        tables, given = self.tables, self.found.get("operators")
        if given is None or tables.table(self.found, ("operators",), given if isinstance(given, dict) else ()) is None:
            return {}
        rates: dict[str, float] = {}
        aten = manifest().namespaces["aten"]
        for key, value in given.items():
            path = ("operators", key)
            name = key.removeprefix("aten.")
            if not _OPERATOR.fullmatch(key) or ("." not in name and name not in aten):
                help = did_you_mean(nearest(name, aten)) or "`tanh`, or of another library `my_kernels.fused_norm`"
                tables.wrong("APL155", f"`{shortened(key, 60)}` is no operator", tables.key(path), help)
                continue
            rate = self._rate(value, path)
            if rate is not None:
                rates[name if "." in name else f"aten.{name}"] = rate
        return rates

    def _seconds(self, table: dict[str, Any], path: tuple[str | int, ...]) -> float:
        given = table.get(str(path[-1]), 0.0)
        what = "a number of seconds, from 0 to an hour"
        return self.tables.number(given, path, 0.0, _LONGEST_TIME, what) or 0.0

    def _capacity(self, memory: dict[str, Any]) -> int | None:
        given, path = memory.get("capacity"), ("memory", "capacity")
        if given is None:
            return None
        what = "a number of bytes, as a text with its unit: `80 GiB`"
        if isinstance(given, str):
            match = _BYTES.fullmatch(given)
            if match is None or match[2] not in UNITS:
                help = 'write the number and its unit: `capacity = "80 GiB"`'
                self.tables.wrong("APL157", f"`capacity` is not {what}", self.tables.value(path), help)
                return None
            given = round(float(match[1]) * UNITS[match[2]][0])
        size = self.tables.number(given, path, 1, _MOST_BYTES, what)
        return None if size is None else int(size)

    def _host(self, host: dict[str, Any] | None) -> float | None:
        if host is None:
            return None
        if "bandwidth" not in host:
            self.tables.missing("host.bandwidth", ("host",), "write `bandwidth = 50e9`, in bytes per second each way")
            return None
        return self._rate(host["bandwidth"], ("host", "bandwidth"))

    def _rate(self, value: Any, path: tuple[str | int, ...]) -> float | None:
        return self.tables.number(value, path, LEAST_RATE, MOST_RATE, "a number of bytes per second")

    def _networks(self) -> tuple[Network, ...]:
        given = self.found.get("network", [])
        if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
            help = "write `[[network]]`, with two brackets, for each"
            self.tables.wrong("APL157", "`network` should be a list of tables", self.tables.key(("network",)), help)
            return ()
        networks = [self._network(each, ("network", at)) for at, each in enumerate(given)]
        for at, network in enumerate(networks):
            if before := next((other for other in networks[:at] if _takes_all_of(other, network)), None):
                which = "groups of any ranks" if before.ranks is None else f"groups inside {before.ranks} ranks"
                message = f"no group ever comes to this network: one above it takes {which}"
                help = "the first entry that fits is taken: write the narrower ones first"
                self.tables.wrong("APL155", message, self.tables.key(("network", at)), help)
        return tuple(networks)

    def _network(self, given: dict[str, Any], path: tuple[str, int]) -> Network:
        tables = self.tables
        tables.unknown(given, path, _NETWORK)
        ranks = given.get("ranks")
        if ranks is not None:
            what = "a whole number of ranks, from 2 on"
            number = tables.number(ranks, (*path, "ranks"), 2, _MOST_RANKS, what)
            if number is not None and number != int(number):
                tables.wrong("APL157", f"`ranks = {ranks}` cannot be: it is {what}", tables.value((*path, "ranks")))
            ranks = None if number is None else int(number)
        bandwidth = given.get("bandwidth")
        if bandwidth is not None:
            bandwidth = self._rate(bandwidth, (*path, "bandwidth"))
        latency = self._seconds(given, (*path, "latency"))
        if "bandwidth" not in given and "times" not in given:
            help = 'write `bandwidth = 45e9`, in bytes per second, or `times = "measured.table"`'
            tables.missing("network.bandwidth", path, help)
        if "latency" in given and "bandwidth" not in given:
            message = "`latency` means nothing without `bandwidth`: measured times have it in them"
            tables.wrong("APL155", message, tables.key((*path, "latency")))
        if "group" in given and "times" not in given:
            message = "`group` means nothing without `times`: it says which rows of the table are meant"
            tables.wrong("APL155", message, tables.key((*path, "group")))
        return Network(ranks, bandwidth, latency, self._times(given, path))

    def _times(self, given: dict[str, Any], path: tuple[str, int]) -> tuple[CollectiveTimes, ...]:
        tables, file, group = self.tables, given.get("times"), given.get("group")
        if file is None:
            return ()
        if not isinstance(file, str) or not file:
            tables.wrong("APL157", "`times` should be the path of a table", tables.value((*path, "times")))
            return ()
        if group is not None and not isinstance(group, str):
            help = f'write `group = "{group}"`' if isinstance(group, int) and 0 <= group < 10**9 else None
            tables.wrong("APL157", "`group` should be a text", tables.value((*path, "group")), help)
            return ()
        rows = read_table(self.folder / file, file)
        if isinstance(rows, Diagnostic):
            named = tables.value((*path, "times"))
            note = Related("the table is named here", named)
            tables.found.append(evolve(rows, span=rows.span or named, related=(note,) if rows.span else ()))
            return ()
        groups = dict.fromkeys(name for name, _ in rows)
        if group is not None and group not in groups:
            help = did_you_mean(nearest(group, groups)) or f"there are {', '.join(f'`{each}`' for each in groups)}"
            tables.wrong("APL157", f"the table has no group `{group}`", tables.value((*path, "group")), help)
            return ()
        times = [each for name, each in rows if group in (None, name)]
        measured: set[tuple[str, int]] = set()
        for each in times:
            if (each.collective, each.ranks) in measured:
                message = f"the table measures `{each.collective}` of {each.ranks} ranks in several groups"
                help = f'say which are meant: `group = "{next(iter(groups))}"`'
                tables.wrong("APL157", message, tables.value((*path, "times")), help)
                return ()
            measured.add((each.collective, each.ranks))
        return tuple(times)


def _takes_all_of(first: Network, second: Network) -> bool:
    """Whether the first prices all groups that the second fits. What lies inside 4 neighbouring ranks lies inside 8."""
    if first.bandwidth is None:
        return False
    return first.ranks is None or (second.ranks is not None and first.ranks % second.ranks == 0)
