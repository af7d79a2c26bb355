"""APL1xx: a name that stands for nothing, or for something else."""

from __future__ import annotations

from policylang.language.codes.declaration import Code
from policylang.language.diagnostics import Severity

CODES: tuple[Code, ...] = (
    Code(
        "APL101",
        "unknown name",
        "The word is neither a `let` name, nor a group of the prelude, nor an operator. Operators are looked up "
        "in the manifest that travels with policylang and, where torch is loaded, in torch's own registry, custom"
        " operators included. A misspelt operator would otherwise be a rule that silently does nothing.",
        wrong="save scaled_dot_product_attenton",
        mended="save attention",
    ),
    Code(
        "APL102",
        "unknown namespace",
        "No operator of this namespace is known here. It may belong to a library of custom operators that is not "
        "loaded now; the name is looked up again when the policy is applied.",
        wrong="save mylib.fused_mlp",
        mended="save mm",
        severity=Severity.WARNING,
    ),
    Code(
        "APL103",
        "file not found",
        'There is no such policy file. Paths in `include "…"` are relative to the file that includes; `include '
        "<name>` and a bare name take a file of the bundled library.",
        wrong='include "no_such_file.apl"',
        mended="include <llama3_sac>",
    ),
    Code(
        "APL104",
        "file cannot be read",
        "The path leads to a folder, or to a file that may not be read.",
    ),
    Code(
        "APL105",
        "include cycle",
        "A file includes itself, directly or through others. The message shows the chain of includes.",
    ),
    Code(
        "APL106",
        "includes go too far",
        "Includes may be nested 32 deep and may bring in 100,000 statements in all. Files that include one "
        "another several times over multiply.",
    ),
    Code(
        "APL107",
        "name defined twice",
        "A `let` name stands for one selector. Included files share their names with the file that includes them.",
        wrong="let big = mm\nlet big = bmm\nsave big",
        mended="let big = mm, bmm\nsave big",
    ),
    Code(
        "APL108",
        "name defined by itself",
        "A `let` may not refer to itself. To name a part of what a group or an operator denotes, choose another "
        "name; an operator is also reached with its namespace.",
        wrong="let add = add where numel > 3\nsave add",
        mended="let adds = add where numel > 3\nsave adds",
    ),
    Code(
        "APL109",
        "name used before it is defined",
        "A `let` name is known from its line on, so that a policy reads from top to bottom.",
        wrong="save big\nlet big = mm",
        mended="let big = mm\nsave big",
    ),
    Code(
        "APL110",
        "name never used",
        "Nothing refers to this `let`. It may be left over, or a rule that was to use it names something else.",
        wrong="let big = mm where bytes > 64 MiB\nsave mm",
        mended="let big = mm where bytes > 64 MiB\nsave big",
        severity=Severity.WARNING,
    ),
    Code(
        "APL111",
        "name hides another",
        "The `let` has the name of a group of the prelude or of an operator, and from here on the word means the "
        "`let`. A reader who knows the language will take it for the other.",
        wrong="let matmul = aten.mm\nsave matmul",
        mended="let plain_matmul = aten.mm\nsave plain_matmul",
        severity=Severity.WARNING,
    ),
    Code(
        "APL112",
        "malformed glob",
        "A module-path glob is a dotted path whose components may hold `*`, `?`, `{a,b}` and `[0-3]`; `**` stands"
        " for any number of components and stands alone between dots; a leading `/` ties the glob to the model's "
        "root.",
        wrong="save mm in layers..0",
        mended="save mm in layers.0",
    ),
    Code(
        "APL113",
        "unknown unit",
        "Figures are plain numbers, bytes (`B`, `KB`, `MB`, `GB`, `TB` in thousands, `KiB`, `MiB`, `GiB`, `TiB` "
        "in 1024s), operations (`FLOP`, `KFLOP`, `MFLOP`, `GFLOP`, `TFLOP`, `PFLOP`) or per cent (`%`).",
        wrong="save mm where bytes > 64 mib",
        mended="save mm where bytes > 64 MiB",
    ),
    Code(
        "APL114",
        "unknown property",
        "A predicate compares `bytes`, `numel`, `ndim`, `shape[i]`, `flops`, `users`, `inputs` or `group_size` "
        "with a number, or `dtype`, `device`, `module` or `overload` with a name, or is one of `from parameter`, "
        "`gathered parameter`, `crosses block`, `feeds backward`, `is view`, `is random`, `is multi_output`, `is "
        "mutated`, `user tagged`, `recorded saved`.",
        wrong="save mm where size > 3",
        mended="save mm where numel > 3",
    ),
    Code(
        "APL115",
        "unknown dtype",
        "The name is not a tensor type. Names are torch's (`bfloat16`) or the common short ones (`bf16`); globs "
        "such as `float8*` are accepted.",
        wrong="save mm where dtype == bf17",
        mended="save mm where dtype == bf16",
    ),
    Code(
        "APL116",
        "unknown choice",
        "The statement takes one of a few words and this is none of them.",
        wrong="undecided -> keep",
        mended="undecided -> save",
    ),
)
