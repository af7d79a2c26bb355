# SYNTAX TEST "source.policylang" "which nodes"

save aten.mm.default, aten.{mm,bmm}
# <---- keyword.control.action.policylang
#    ^^^^^^^^^^^^^^^ entity.name.function.operator.policylang
#                   ^ punctuation.separator.comma.policylang
#                     ^^^^^^^^^^^^^ entity.name.function.operator.policylang
save first 2 attention in layers.*.wo outside "block"
# <---- keyword.control.action.policylang
#    ^^^^^ keyword.other.selector.policylang
#          ^ constant.numeric.policylang
#            ^^^^^^^^^ support.function.group.policylang
#                      ^^ keyword.other.selector.policylang
#                         ^^^^^^^^^^^ entity.name.namespace.module.policylang
#                                     ^^^^^^^ keyword.other.selector.policylang
#                                             ^ string.quoted.double.policylang
#                                              ^^^^^ string.quoted.double.policylang
#                                                   ^ string.quoted.double.policylang
save every 2nd block.in in every 2nd block from 1st
# <---- keyword.control.action.policylang
#    ^^^^^ keyword.other.selector.policylang
#          ^^^ constant.numeric.ordinal.policylang
#              ^^^^^^^^ entity.name.function.operator.policylang
#                       ^^ keyword.other.selector.policylang
#                          ^^^^^ keyword.other.selector.policylang
#                                ^^^ constant.numeric.ordinal.policylang
#                                    ^^^^^ keyword.other.selector.policylang
#                                          ^^^^ keyword.other.selector.policylang
#                                               ^^^ constant.numeric.ordinal.policylang
save mm in first half of blocks, mm in last 50% of blocks
# <---- keyword.control.action.policylang
#    ^^ entity.name.function.operator.policylang
#       ^^ keyword.other.selector.policylang
#          ^^^^^ keyword.other.selector.policylang
#                ^^^^ keyword.other.selector.policylang
#                     ^^ keyword.other.selector.policylang
#                        ^^^^^^ keyword.other.selector.policylang
#                              ^ punctuation.separator.comma.policylang
#                                ^^ entity.name.function.operator.policylang
#                                   ^^ keyword.other.selector.policylang
#                                      ^^^^ keyword.other.selector.policylang
#                                           ^^ constant.numeric.policylang
#                                             ^ keyword.other.unit.policylang
#                                               ^^ keyword.other.selector.policylang
#                                                  ^^^^^^ keyword.other.selector.policylang
save first mm in blocks 0..3 per module
# <---- keyword.control.action.policylang
#    ^^^^^ keyword.other.selector.policylang
#          ^^ entity.name.function.operator.policylang
#             ^^ keyword.other.selector.policylang
#                ^^^^^^ keyword.other.selector.policylang
#                       ^^^^ constant.numeric.range.policylang
#                            ^^^ keyword.other.selector.policylang
#                                ^^^^^^ keyword.other.selector.policylang
users of cast feeding mm except add fed by half -> offload up to 8GiB per rank
# <----- keyword.other.selector.policylang
#     ^^ keyword.other.selector.policylang
#        ^^^^ support.function.group.policylang
#             ^^^^^^^ keyword.operator.logical.policylang
#                     ^^ entity.name.function.operator.policylang
#                        ^^^^^^ keyword.operator.logical.policylang
#                               ^^^ entity.name.function.operator.policylang
#                                   ^^^ keyword.operator.logical.policylang
#                                       ^^ keyword.operator.logical.policylang
#                                          ^^^^ entity.name.function.operator.policylang
#                                               ^^ keyword.operator.arrow.policylang
#                                                  ^^^^^^^ keyword.control.action.policylang
#                                                          ^^ keyword.other.selector.policylang
#                                                             ^^ keyword.other.selector.policylang
#                                                                ^ constant.numeric.policylang
#                                                                 ^^^ keyword.other.unit.policylang
#                                                                     ^^^ keyword.other.selector.policylang
#                                                                         ^^^^ keyword.other.selector.policylang
chain through all_gather or wait and mm -> save
# <----- keyword.other.selector.policylang
#     ^^^^^^^ keyword.other.selector.policylang
#             ^^^^^^^^^^ support.function.group.policylang
#                        ^^ keyword.operator.logical.policylang
#                           ^^^^ support.function.group.policylang
#                                ^^^ keyword.operator.logical.policylang
#                                    ^^ entity.name.function.operator.policylang
#                                       ^^ keyword.operator.arrow.policylang
#                                          ^^^^ keyword.control.action.policylang
save mm in 3
# <---- keyword.control.action.policylang
#    ^^ entity.name.function.operator.policylang
#       ^^ keyword.other.selector.policylang
#          ^ entity.name.namespace.module.policylang
