"""List the policies that come with policylang, one line each.

Any command takes them by their bare names, and so do `policylang.load` and `policylang.backend`; your policy includes
one with `include <NAME>`.

examples:

  policylang list
  policylang list --output-format json
  policylang check llama3_sac --graph my.graph

exit codes: 0 listed
"""

from __future__ import annotations

import argparse
import json

from policylang.api.load import bundled_policies
from policylang.commands.inputs import add_form
from policylang.commands.output import Exit, say
from policylang.report.layout import table


def arguments(parser: argparse.ArgumentParser) -> None:
    add_form(parser, "json")


def run(options: argparse.Namespace) -> Exit:
    found = bundled_policies()
    if options.output_format == "json":
        policies = [{"name": each.name, "description": each.description, "file": str(each.file)} for each in found]
        say(json.dumps({"version": 1, "policies": policies}, indent=2), "json")
    else:
        rows = [("policy", "what it does"), *((each.name, each.description) for each in found)]
        say(table(rows, right=range(0), wraps=True))
    return Exit.CLEAN
