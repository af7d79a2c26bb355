# SYNTAX TEST "source.policylang" "what opens a statement, and the names that it gives"

policy save  # named like an action
# <------ keyword.control.statement.policylang
#      ^^^^ entity.name.type.policy.policylang
#            ^ comment.line.number-sign.policylang
#             ^^^^^^^^^^^^^^^^^^^^^ comment.line.number-sign.policylang
requires policylang >= 0.2
# <-------- keyword.control.statement.policylang
#        ^^^^^^^^^^ entity.name.namespace.policylang
#                   ^^ keyword.operator.comparison.policylang
#                      ^^^ constant.numeric.version.policylang
include "other.apl"
# <------- keyword.control.statement.policylang
#       ^ string.quoted.double.policylang
#        ^^^^^^^^^ string.quoted.double.policylang
#                 ^ string.quoted.double.policylang
include <fsdp>
# <------- keyword.control.statement.policylang
#       ^^^^^^ string.other.bundled.policylang
device h100-sxm
# <------ keyword.control.statement.policylang
#      ^^^^^^^^ support.constant.device.policylang
device "cluster.toml"; device cpu
# <------ keyword.control.statement.policylang
#      ^ string.quoted.double.policylang
#       ^^^^^^^^^^^^ string.quoted.double.policylang
#                   ^ string.quoted.double.policylang
#                    ^ punctuation.terminator.statement.policylang
#                      ^^^^^^ keyword.control.statement.policylang
#                             ^^^ support.constant.device.policylang
device in block -> save
# <------ entity.name.function.operator.policylang
#      ^^ keyword.other.selector.policylang
#         ^^^^^ keyword.other.selector.policylang
#               ^^ keyword.operator.arrow.policylang
#                  ^^^^ keyword.control.action.policylang
blocks {layers,in}.*
# <------ keyword.control.statement.policylang
#      ^^^^^^^^^^^^^ entity.name.namespace.module.policylang
let save_me = mm
# <--- keyword.control.statement.policylang
#   ^^^^^^^ entity.name.type.let.policylang
#           ^ keyword.operator.assignment.policylang
#             ^^ entity.name.function.operator.policylang
undecided -> auto
# <--------- keyword.control.statement.policylang
#         ^^ keyword.operator.arrow.policylang
#            ^^^^ constant.language.policylang
undecided → recompute
# <--------- keyword.control.statement.policylang
#         ^ keyword.operator.arrow.policylang
#           ^^^^^^^^^ keyword.control.action.policylang
optional override must_recompute mm
# <-------- storage.modifier.policylang
#        ^^^^^^^^ storage.modifier.policylang
#                 ^^^^^^^^^^^^^^ keyword.control.action.policylang
#                                ^^ entity.name.function.operator.policylang
fuse all_gather chains over dp, save
# <---- keyword.control.statement.policylang
#    ^^^^^^^^^^ support.function.group.policylang
#               ^^^^^^ keyword.other.selector.policylang
#                      ^^^^ keyword.other.selector.policylang
#                           ^^ variable.parameter.dimension.policylang
#                             ^ punctuation.separator.comma.policylang
#                               ^^^^ variable.parameter.dimension.policylang
collapse round_trips
# <-------- keyword.control.statement.policylang
#        ^^^^^^^^^^^ keyword.other.selector.policylang
chunk loss into 8
# <----- keyword.control.statement.policylang
#     ^^^^ keyword.other.selector.policylang
#          ^^^^ keyword.other.selector.policylang
