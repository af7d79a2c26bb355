"""Every private name of torch that policylang uses, one module per stage, one function each, and why it is needed.

Supported: torch 2.11 to the newest; seen to run on 2.13.0. If a version lacks a name, the function's error names what
is missing and what needs it. Nothing here depends on the rest of policylang.
"""
