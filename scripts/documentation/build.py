"""Builds the site of the documentation: see ``scripts/docs``."""

from __future__ import annotations

import argparse
import contextlib
import functools
import shutil
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT)]  # the checkout that this file is of, whatever is installed

from scripts.documentation.staging import Staging  # noqa: E402  # found there


def build(site: Path, work: Path, root: Path = ROOT) -> int:
    """Build the site, strictly: a link, an anchor or a name that leads nowhere, or a page that nothing leads to, is an
    error. ``work`` holds what Sphinx reads.

    Every page is read and written each time: Sphinx says what is wrong with a page when it reads or writes it, and an
    unchanged page can come to lead to a heading that is gone.
    """
    from sphinx.cmd.build import main as sphinx

    if (site / ".buildinfo").is_file():  # a site of Sphinx's making, whose pages may be gone by now
        shutil.rmtree(site)
    Staging(root, work / "source").fill()
    strict = ("--fail-on-warning", "--keep-going", "--quiet", "--fresh-env", "--write-all")
    folders = (str(work / "source"), str(site))
    return sphinx([*strict, "--conf-dir", str(HERE), "--doctree-dir", str(work / "doctrees"), *folders])


def serve(site: Path, port: int) -> None:
    """Show the site on this machine until interrupted."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"http://127.0.0.1:{server.server_port}/", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/docs", description="Build the site of the documentation.")
    parser.add_argument("--site-dir", type=Path, default=ROOT / "build" / "site", help="where to (default: build/site)")
    parser.add_argument("--serve", type=int, nargs="?", const=8000, metavar="PORT", help="and show it (default: 8000)")
    chosen = parser.parse_args(arguments)
    site = chosen.site_dir.resolve()
    status = build(site, ROOT / "build" / "documentation")
    if status == 0:
        print(site / "index.html")
        if chosen.serve is not None:
            serve(site, chosen.serve)
    return status


if __name__ == "__main__":
    sys.exit(main())
