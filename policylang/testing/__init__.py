"""Policy tests: Markdown files whose policies say in comments what is to come of them (``docs/policy-tests.md``).

``fences`` finds the fenced blocks of a file, ``claims`` reads what the comments of a policy claim, ``graphs`` finds the
graph a policy is planned on, ``cases`` runs one policy, ``files`` runs files of them, and ``coverage`` says which rules
no test has exercised. None of it needs torch.
"""
