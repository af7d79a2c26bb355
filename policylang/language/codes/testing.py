"""APL5xx: policy tests and the graphs that are written in them, formatting, and policies made from other forms."""

from __future__ import annotations

from policylang.language.codes.declaration import Code

CODES: tuple[Code, ...] = (
    Code(
        "APL501",
        "not a line of a graph",
        "A graph in a policy test is written one node a line, such as "
        "`%y = aten.mm.default(%x, %w) layers.0 shape=8x8 dtype=bf16`. `docs/policy-tests.md` describes the form.",
    ),
    Code(
        "APL502",
        "a node that is not there, or twice",
        "A line of a graph may read the nodes of the lines above it, by their names, and a name is given once.",
    ),
    Code(
        "APL503",
        "a word that says nothing of a node",
        "Behind the call, a line of a graph holds the module path of its node, flags such as `view`, and figures such "
        "as `bytes=64`. The operator has to be one that torch has, in full; a misspelt one would make a test that "
        "passes for the wrong reason.",
    ),
    Code(
        "APL504",
        "words behind a fence",
        "Behind the fence of a policy test stands what it is planned on: `apl graph=two_layers` names a block "
        "`graph two_layers` of the same file, `apl graph=llama3_8b.graph` a snapshot beside it. `apl ignore` is shown "
        "and not tested; `apl allow=APL303` does not mind that warning. "
        "A block `graph` may have a name and a kind: `joint`, `flat` or `forward`.",
    ),
    Code(
        "APL510",
        "not what the policy says comes of it",
        "A comment in a policy test claims which nodes a rule matches or decides, or which values are saved or "
        "computed again, and it is otherwise. Either is wrong; the message says what was found.",
    ),
    Code(
        "APL511",
        "an expected diagnostic that does not come",
        "A comment in a policy test claims that its line gets an error or a warning, and it does not. Behind a "
        "statement the claim is about that statement, on a line of its own about the whole policy.",
    ),
    Code(
        "APL512",
        "a claim that cannot be read",
        "A comment of a policy test that starts with `matches:`, `decides:`, `saved:`, `recomputed:`, `error:` or "
        "`warning:` is a claim. What cannot be read would never be checked, so it is an error.",
    ),
    Code(
        "APL513",
        "a claim without a graph",
        "Which nodes a rule matches is a question to a graph, and this policy has none: name one behind the fence, or "
        "put a `graph` block above it, under the same heading.",
    ),
    Code(
        "APL514",
        "a rule that no test exercises",
        "With `policylang test --cover`, every rule of a policy has to match at least one node in some test: a rule "
        "that none exercises may say anything.",
    ),
    Code(
        "APL515",
        "nothing to test",
        "The file or folder holds no policy. A policy test is a Markdown file with fenced blocks of `apl`; a "
        "test run that finds none has most likely been given the wrong path.",
    ),
    Code(
        "APL520",
        "formatting would change more than the layout",
        "`policylang fmt` proves what it writes: the same tree, the same words, every comment between the same words, "
        "and nothing left to format. The proof failed, so the file is as it was. This is a bug in policylang.",
    ),
    Code(
        "APL530",
        "not a selector of TorchTitan's",
        "TorchTitan's full_recompute_save_ops is a list of `MODULE::OPERATOR`, separated by `|`: a pattern over the "
        "full name of a module, and an operator in full, with its overload.",
    ),
    Code(
        "APL531",
        "a pattern that means something else",
        "TorchTitan compares the full name of a module with a pattern component by component: `*`, `?` and `[0-3]` "
        "stay within one component, `**` is no more than `*`, and braces stand for themselves. A pattern that a policy "
        "would read in another way is refused rather than carried over.",
    ),
)
