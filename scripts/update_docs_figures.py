#!/usr/bin/env python
"""Write into the pages what the runs print whose outputs they show: README.md and docs/*.md.

    scripts/update_docs_figures.py                    # everything; about ten minutes
    scripts/update_docs_figures.py docs/cookbook.md   # some pages
    scripts/update_docs_figures.py --graphs           # trace the snapshots in docs/graphs again first
    scripts/update_docs_figures.py --check            # write nothing; exit with 1 where a page is not what runs print

Run it with the Python of an environment that has the extra `test`, for example `.venv/bin/python`. The same functions
are what tests/documents/test_pages.py compares with. Times are left as they stand unless something else changed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    if options.graphs:
        trace_graphs(ROOT / "docs" / "graphs")
    from tests.documents.outputs import PAGES, PICTURE, blocks, masked, picture, produce, rewritten

    changed = 0
    for page in [page.resolve() for page in options.pages] or PAGES:
        for shown in reversed(
            blocks(page)
        ):  # from the end, so that what is written moves nothing that is still to come
            found = produce(shown)
            if masked(shown, found) != masked(shown, shown.text):
                changed += 1
                print(f"{page.relative_to(ROOT)}: {shown.name}", flush=True)
                if not options.check and shown.words[0] == "picture":
                    PICTURE.write_text(picture(shown), encoding="utf-8")
                if not options.check:
                    page.write_text(rewritten(page.read_text(encoding="utf-8"), shown, found), encoding="utf-8")
    print(f"{changed} outputs {'differ' if options.check else 'written'}")
    return int(options.check and changed > 0)


def trace_graphs(folder: Path) -> None:
    """A snapshot of each model of the cookbook. Leaves a process group behind: call it in a process of its own."""
    import policylang
    from examples.cookbook_models import MODELS

    for name, make in MODELS.items():
        (path,) = policylang.snapshot(make(), folder / f"{name}.graph")
        print(f"traced {path.name}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
