"""Peak against time, drawn: an SVG of plain shapes, which a page shows and a text editor reads."""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 20, 78
GIB = 2**30
FAMILIES = {
    "torch": ("PyTorch's activation_memory_budget", "#d1495b"),
    "by hand": ("written by hand", "#8d99ae"),
    "bundled": ("bundled policies", "#e09f3e"),
}
TUNED = ("tuned", "#00798c")


def picture(result: dict[str, Any]) -> str:
    """One graph's results: a dot for each policy of others, a staircase for the tuned ones."""
    forward = result["forward s"]
    made = [*result["tuned"], *result["tuned at the peaks of others"]]
    tuned = [(each["peak"] / GIB, each["recompute"] / forward) for each in made if each["rules"]]
    dots = {
        family: [
            (each["peak"] / GIB, each["recompute"] / forward) for each in result["others"] if each["family"] == family
        ]
        for family in FAMILIES
    }
    low, high = min(x for x, _ in tuned), max(x for x, _ in tuned)
    margin = 0.06 * (high - low)
    left, right = low - margin, high + margin
    top = max([0.01, *(y for _, y in tuned)]) * 1.25

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    parts = [*_axes(left, right, top, place)]
    for family, (_, colour) in FAMILIES.items():
        for x, y in sorted(set(dots[family])):
            if left <= x <= right and y <= top:
                across, up = place(x, y)
                parts.append(f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3" fill="{colour}" fill-opacity="0.75"/>')
    parts.append(_stairs(tuned, right, place))
    parts += _legend({name: sum(x <= right and y <= top for x, y in points) for name, points in dots.items()}, dots)
    title = f"{result['graph']}, {result['nodes']:,} nodes, on {result['device']}: simulated peak against recomputation"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="#333">\n<title>{escape(title)}</title>\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _stairs(tuned: list[tuple[float, float]], right: float, place: Any) -> str:
    points: list[tuple[float, float]] = []
    for x, y in sorted(set(tuned)):
        if points:
            points.append((x, points[-1][1]))
        points.append((x, y))
    points.append((right, points[-1][1]))
    drawn = " ".join(f"{across:.1f},{up:.1f}" for across, up in (place(x, y) for x, y in points))
    return f'<polyline points="{drawn}" fill="none" stroke="{TUNED[1]}" stroke-width="2"/>'


def _axes(left: float, right: float, top: float, place: Any) -> list[str]:
    parts = []
    for value in _ticks(left, right):
        x, y = place(value, 0)
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{y:.1f}" stroke="#eee"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{value:g}</text>')
    for value in _ticks(0, 100 * top):
        x, y = place(left, value / 100)
        parts.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#eee"/>')
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{value:g}%</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - BOTTOM + 34}" text-anchor="middle">simulated peak of a step, GiB</text>'
    )
    across = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text transform="translate(16 {across}) rotate(-90)" text-anchor="middle">'
        "second runs, of the forward's time</text>"
    )
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between, at most ten."""
    step = 10.0 ** len(str(int(high - low)))
    while (high - low) / step < 4:
        step /= 2 if f"{step:e}"[0] in "15" else 2.5
    first = -(-low // step)
    return [round(step * (first + each), 9) for each in range(12) if step * (first + each) <= high]


def _legend(shown: dict[str, int], dots: dict[str, list[tuple[float, float]]]) -> list[str]:
    parts = []
    entries = [TUNED, *((f"{FAMILIES[name][0]} ({shown[name]} of {len(dots[name])} in view)", FAMILIES[name][1])
                        for name in FAMILIES)]  # fmt: skip
    for number, (name, colour) in enumerate(entries):
        x, y = LEFT + 350 * (number % 2), HEIGHT - 26 + 18 * (number // 2)
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{y}">{escape(name)}</text>')
    return parts
