"""Device profiles as TOML, bundled or the user's own."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from policylang.language.codes import diagnose
from policylang.language.devices.profile import DeviceProfile, Network, Rate
from policylang.language.diagnostics import Diagnostic
from policylang.language.resources import devices_folder


def read_device(name: str, base: Path | None = None) -> DeviceProfile | Diagnostic:
    """The profile of a name of the library or of a file, which is looked for from ``base`` on."""
    path = devices_folder() / f"{name}.toml"
    if not path.is_file():
        path = (base or Path()) / name
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return diagnose("APL104", f"there is no device profile `{name}`")
    found: dict[str, Any] = tomllib.loads(text)
    memory = found["memory"]
    return DeviceProfile(
        name=found["name"],
        compute={dtype: Rate.constant(rate) for dtype, rate in found["compute"].items()},
        bandwidth=Rate.constant(memory["bandwidth"]),
        pointwise=memory.get("pointwise", 1.0),
        capacity=None,
        host_bandwidth=found.get("host", {}).get("bandwidth"),
        networks=tuple(
            Network(each.get("ranks"), each.get("bandwidth"), each.get("latency", 0.0))
            for each in found.get("network", ())
        ),
        canonical=text,
    )
