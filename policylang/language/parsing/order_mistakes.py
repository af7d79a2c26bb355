"""What people write of the order of collectives who know PyTorch's settings, or these lines by hearsay: the rows of
``common_mistakes.py`` for ``bucket``, ``prefetch``, ``delay``, ``overlap`` and ``keep order``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import ROUND_CEILING, Decimal

from policylang.language.parsing.mistake_patterns import NUMBERS, Replacement, any_word, looked_up

Row = tuple[str, Replacement, str] | tuple[str, Replacement, str, str | None, str | None]

_STATEMENTS = r"(?:bucket|prefetch|delay|overlap|keep\s+order)"
_START = r"^\s*(?:optional\s+)?"
_BLOCKS = r"(?:blocks?|layers?)"
_SIZE = r"(?P<size>\d[\w.]*(?:\s*(?:[KMGTkmgt]i?[Bb]|bytes|B))?)"
_SHARE = r"(?P<size>\d[\w.]*(?:\s*(?:[KMGTkmgt]i?[Bb]|bytes|B|%))?)"
_LIMIT = r"(?:(?:up(?:\s+to)?|to|max(?:imum)?|at\s+most|of(?:\s+size)?|size|with|under|below|within|limit|"
_LIMIT += r"less\s+than|no\s+more\s+than|fewer\s+than)\s+|<=?\s*)"
_VERBS = {
    **dict.fromkeys(
        ("prefetching", "prefetched", "pre_fetch", "pre-fetch", "pre fetch", "preload", "hoist"), "prefetch"
    ),
    **dict.fromkeys(("bucketing", "bucketed", "bucketize", "bucketise", "buckets", "coalesce", "merge"), "bucket"),
    **dict.fromkeys(("group", "batch", "combine"), "bucket"),
    **dict.fromkeys(("delayed", "delaying", "postpone", "defer", "lag"), "delay"),
    **dict.fromkeys(("overlapping", "overlapped", "hide", "reorder", "schedule"), "overlap"),
}
_SETTINGS = {
    r"(?P<knob>bucket_cap_mb)\s*[:=]?\s*(?P<n>\d[\d.]*)": "bucket reduce_scatter up to {n} MiB",
    r"(?P<knob>max_in_flight_gb)\s*[:=]?\s*(?P<n>\d[\d.]*)": "overlap collective up to {n} GiB in flight",
    r"(?P<knob>max_memory_increase_gb)\s*[:=]?\s*(?P<n>\d[\d.]*)": "overlap collective within {n} GiB of peak",
    r"(?P<knob>enable_overlap_scheduling|enable_simple_overlap|reorder_for_compute_comm_overlap)\b.*": (
        "overlap collective"
    ),
    r"(?P<knob>collective_bucketing)\b.*": "bucket (all_gather where from parameter) per block",
    r"(?P<knob>forward_prefetch|backward_prefetch|set_modules_to_(?:for|back)ward_prefetch)\b.*": (
        "prefetch (all_gather where from parameter) 1 block ahead"
    ),
    r"(?P<knob>reshard_after_forward)\s*[:=]?\s*(?:False|false|0)": "include <fsdp_reshard_never>",
    r"(?P<knob>reshard_after_forward)\b.*": "include <fsdp_reshard_always>",
}


def rows() -> Iterator[Row]:
    # --- what stands before a line ---
    yield (
        rf"^\s*(?:optional\s+)?(?P<bad>override)\s+(?:optional\s+)?{_STATEMENTS}\s",
        *("", "`override` stands before a rule: the order of collectives has nothing to go before", None, "APL010"),
    )
    yield (
        rf"^\s*(?P<bad>optional\s+optional)\s+{_STATEMENTS}\s",
        *("optional", "`optional` stands before this line twice", None, "APL209"),
    )
    yield (
        rf"{_START}(?P<bad>bucket|prefetch|delay|overlap)\s+(?:per|in|outside|where|chain|up\s+to|within)\s",
        *("{bad} all_gather", "no selector stands behind `{bad}`", "such as `{good}`", None),
    )
    for setting, line in _SETTINGS.items():
        yield (
            rf"^\s*(?P<bad>(?:[\w.]+\.)?{setting})\s*$",
            *(line, "`{knob}` is a setting of PyTorch's, and a policy says it in a line of its own", None, "APL012"),
        )
    yield rf"{_START}(?P<bad>{any_word([*_VERBS])})(?=\s+[\w(*])", looked_up(_VERBS), *_NO_START
    yield (
        rf"{_START}(?P<bad>(?:keep|preserve|maintain|retain|fix|freeze|pin|hold)\s+(?:the\s+)?order\b"
        r"(?:\s+(?:of|for|in|among|between))?(?:\s+the)?)\s+[\w(*]",
        *("keep order of", *_KEPT),
    )
    yield (
        rf"{_START}(?P<bad>keep\s+order)\s*$",
        *("keep order of all_to_all", "the order of which collectives is kept is said behind `of`"),
        *("such as `{good}`", "APL011"),
    )
    yield (
        rf"{_START}(?P<bad>(?:keep|preserve)\s+(?P<what>[^;]+?)\s+(?:in\s+(?:its\s+|their\s+)?order|ordered))\s*$",
        *("keep order of {what}", *_KEPT),
    )
    yield rf"{_START}(?P<bad>(?:barrier|fence)\s+(?:for\s+|at\s+|on\s+)?)[\w(*]", "keep order of ", *_KEPT

    # --- blocks ahead, blocks later ---
    distance = rf"{_START}(?:prefetch|delay)\b.*?\s"
    yield (
        rf"{_START}(?:prefetch|delay)\s+(?P<bad>(?P<what>[^()]*\bin\s+blocks?))\s+\d+\s+{_BLOCKS}\b",
        *("({what})", "a number behind `block` is the number of one"),
    )
    yield (
        rf"{distance}(?P<bad>[-−]\s?\d+)\s+{_BLOCKS}\b",
        *(lambda _: [], "a distance is a number of blocks, from 1 on"),
        *("`prefetch … 1 block ahead` starts earlier, `delay … 1 block` awaits later", "APL205"),
    )
    yield rf"{distance}(?P<bad>\d+\.\d+)\s+{_BLOCKS}\b", _whole, "blocks are counted whole"
    yield (
        rf"{distance}(?P<bad>{any_word([*NUMBERS])})\s+{_BLOCKS}\b",
        looked_up(NUMBERS),
        "blocks are counted in digits",
    )
    yield rf"{distance}(?P<bad>(?:by|for|of|at|with|to)\s+(?P<number>\d+))\s+{_BLOCKS}\b", "{number}", *_DISTANCE
    yield (
        rf"{distance}(?P<bad>(?:by\s+|for\s+)?\d[\d.]*\s*(?:ns|us|µs|μs|ms|s|sec|seconds?))(?:\s+ahead)?\s*$",
        *(lambda _: [], "a distance is counted in blocks, not in time", "such as `1 block`", None),
    )
    yield (
        rf"{_START}prefetch\s+(?!.*\d\s+{_BLOCKS})\S.*?(?P<bad>\bper\s+block|\bahead|\bearly)\s*$",
        *("1 block ahead", "a prefetch says how many blocks ahead"),
    )
    yield rf"{_START}prefetch\s.*\s(?P<bad>\d+\s+blocks?)\s*$", "{bad} ahead", "a prefetch is so many blocks `ahead`"
    yield (
        rf"{_START}delay\b.*\d\s+{_BLOCKS}(?P<bad>\s+(?:ahead|later|late|behind|after|longer))\s*$",
        *("", "a delay says how many blocks later, and no more"),
    )
    yield (
        rf"{_START}(?:prefetch|delay)\b.*\d\s+{_BLOCKS}(?:\s+ahead)?(?P<bad>\s+(?:up\s+to|within)\s.*)$",
        *("", "a limit belongs to `bucket` or `overlap`"),
    )
    yield (
        rf"{_START}(?:bucket|prefetch|delay|overlap)\b.*(?P<bad>\s+(?:in|of|during)\s+(?:the\s+)?"
        r"(?:forward|backward|both)(?:\s+(?:pass|half))?)\s*$",
        *("", "a line holds in the forward and in the backward, each in its own order of blocks"),
    )

    # --- how much one bucket holds ---
    yield (
        rf"{_START}bucket\s+.*?\s(?P<bad>(?:up\s+to\s+)?{_SIZE}\s+(?P<per>per\s+(?:\d+\s+)?blocks?))\s*$",
        *("{per} up to {size}", "`per` stands before `up to`"),
    )
    yield (
        rf"{_START}(?:bucket|overlap)\b.*(?P<bad>\s(?:per|on\s+each|on\s+every)\s+(?:rank|gpu|device))\s*$",
        *("", "a policy speaks of one rank's graph"),
    )
    yield (
        rf"{_START}bucket\s+.*?\s(?P<bad>(?:(?:in|for|by|per|over|across)\s+)?(?:(?:every|each|all|by|per|over|across)\s+)"
        rf"(?:(?P<number>\d+|{any_word([*NUMBERS])})(?:st|nd|rd|th)?\s+)?{_BLOCKS})(?!\S)",
        *(_per, "how many blocks go into one bucket is said by `per`"),
    )
    yield (
        rf"{_START}bucket\s+.*?\s(?P<bad>per\s+(?:module|chain|graph|step|group|rank))\s*$",
        *("per block", "a bucket is of whole blocks, or up to a size"),
        *("write `per block`, or a size such as `up to 256 MiB`", "APL010"),
    )
    yield (
        rf"{_START}bucket\s+(?:.*?\s)?(?P<bad>(?!up\s+to\b){_LIMIT}?{_SIZE})\s*$",
        *("up to {size}", "how much one bucket holds is said by `up to`"),
    )

    # --- the limits of the list scheduler ---
    overlap = rf"{_START}overlap\s+.*?\s"
    yield (
        rf"{overlap}(?P<bad>(?P<peak>within\s+\d.*?\s+of\s+peak)\s+(?P<flight>up\s+to\s+\d.*?\s+in\s+flight))\s*$",
        *("{flight} {peak}", "what is in flight is limited before the peak"),
    )
    yield rf"{overlap}(?P<bad>in[_\-]?flight|on\s+the\s+fly|outstanding|at\s+once)(?!\S)", "in flight", *_IN_FLIGHT
    yield rf"{overlap}(?P<bad>in\s+flight\s+{_LIMIT}{_SIZE})(?!\S)", "up to {size} in flight", *_IN_FLIGHT
    yield (
        rf"{overlap}(?P<bad>(?!up\s+to\b){_LIMIT}?{_SIZE})\s+in\s+flight\b",
        *("up to {size}", "what is in flight is limited by `up to`"),
    )
    above = r"(?:above|over|beyond|more\s+than|on\s+top\s+of|of)\s+(?:the\s+)?peak(?:\s+memory)?"
    yield rf"{overlap}(?P<bad>{_LIMIT}?{_SHARE}\s+{above})\s*$", "within {size} of peak", *_OF_PEAK
    yield (
        rf"{overlap}(?P<bad>(?:by\s+)?\d+\s+{_BLOCKS}(?:\s+(?:ahead|later))?|per\s+block)\s*$",
        *("", "`overlap` goes by times, not by blocks"),
    )
    yield (
        rf"{overlap}(?P<bad>with\s+(?:the\s+)?(?:compute|computation|matmul|mm|everything))\s*$",
        *("", "what is overlapped is hidden behind computation, whichever it is"),
    )


_NO_START = ("`{bad}` does not start a statement", None, "APL012")
_KEPT = ("an order is kept as in `keep order of all_to_all`", None, "APL012")
_DISTANCE = ("a distance is a number of blocks alone",)
_IN_FLIGHT = ("what is started and not awaited is `in flight`",)
_OF_PEAK = ("how much the peak may rise is said as in `within 1 GiB of peak`",)


def _whole(match: re.Match[str]) -> str:
    return str(max(1, int(Decimal(match["bad"]).to_integral_value(ROUND_CEILING))))


def _per(match: re.Match[str]) -> str:
    number = match["number"]
    number = NUMBERS.get(number or "", number)
    return "per block" if number in (None, "1") else f"per {number} blocks"
