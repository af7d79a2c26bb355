"""One policy down every path, on one model: what each saves, recomputes and computes, and where they part.

``running`` takes one step on each path, ``numbers`` compares what the steps computed, ``values`` what was decided and
kept, value by value, and ``comparison`` puts it together. What counts as agreement is said in ``docs/agree.md``.
"""
