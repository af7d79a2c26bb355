"""Every private name of torch that policylang uses, a module a stage, one function each, and why it is needed.

Supported: torch 2.11 to the newest; seen to run on 2.13.0. Where a version lacks a name, the function says what is
missing and what needs it. Nothing here knows anything of policylang's own.
"""
