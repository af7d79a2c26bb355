# SYNTAX TEST "source.policylang" "when collectives run"

bucket (all_gather where from parameter) per 2 blocks up to 512 MiB
# <------ keyword.control.statement.policylang
#      ^ punctuation.section.parens.begin.policylang
#       ^^^^^^^^^^ support.function.group.policylang
#                  ^^^^^ keyword.other.selector.policylang
#                        ^^^^ keyword.other.selector.policylang
#                             ^^^^^^^^^ support.type.property-name.policylang
#                                      ^ punctuation.section.parens.end.policylang
#                                        ^^^ keyword.other.selector.policylang
#                                            ^ constant.numeric.policylang
#                                              ^^^^^^ keyword.other.selector.policylang
#                                                     ^^ keyword.other.selector.policylang
#                                                        ^^ keyword.other.selector.policylang
#                                                           ^^^ constant.numeric.policylang
#                                                               ^^^ keyword.other.unit.policylang
optional prefetch (ahead in block) 1 block ahead
# <-------- storage.modifier.policylang
#        ^^^^^^^^ keyword.control.statement.policylang
#                 ^ punctuation.section.parens.begin.policylang
#                  ^^^^^ entity.name.function.operator.policylang
#                        ^^ keyword.other.selector.policylang
#                           ^^^^^ keyword.other.selector.policylang
#                                ^ punctuation.section.parens.end.policylang
#                                  ^ constant.numeric.policylang
#                                    ^^^^^ keyword.other.selector.policylang
#                                          ^^^^^ keyword.other.selector.policylang
delay reduce_scatter 2 blocks
# <----- keyword.control.statement.policylang
#     ^^^^^^^^^^^^^^ support.function.group.policylang
#                    ^ constant.numeric.policylang
#                      ^^^^^^ keyword.other.selector.policylang
overlap collective up to 2 GiB in flight within 5% of peak
# <------- keyword.control.statement.policylang
#       ^^^^^^^^^^ support.function.group.policylang
#                  ^^ keyword.other.selector.policylang
#                     ^^ keyword.other.selector.policylang
#                        ^ constant.numeric.policylang
#                          ^^^ keyword.other.unit.policylang
#                              ^^ keyword.other.selector.policylang
#                                 ^^^^^^ keyword.other.selector.policylang
#                                        ^^^^^^ keyword.other.selector.policylang
#                                               ^ constant.numeric.policylang
#                                                ^ keyword.other.unit.policylang
#                                                  ^^ keyword.other.selector.policylang
#                                                     ^^^^ keyword.other.selector.policylang
keep order of all_to_all
# <---- keyword.control.statement.policylang
#    ^^^^^ keyword.control.statement.policylang
#          ^^ keyword.other.selector.policylang
#             ^^^^^^^^^^ support.function.group.policylang
bucket in block, delay -> save
# <------ entity.name.function.operator.policylang
#      ^^ keyword.other.selector.policylang
#         ^^^^^ keyword.other.selector.policylang
#              ^ punctuation.separator.comma.policylang
#                ^^^^^ entity.name.function.operator.policylang
#                      ^^ keyword.operator.arrow.policylang
#                         ^^^^ keyword.control.action.policylang
keep, order, up, to, rank, within, flight -> leave
# <---- entity.name.function.operator.policylang
#   ^ punctuation.separator.comma.policylang
#     ^^^^^ entity.name.function.operator.policylang
#          ^ punctuation.separator.comma.policylang
#            ^^ entity.name.function.operator.policylang
#              ^ punctuation.separator.comma.policylang
#                ^^ entity.name.function.operator.policylang
#                  ^ punctuation.separator.comma.policylang
#                    ^^^^ entity.name.function.operator.policylang
#                        ^ punctuation.separator.comma.policylang
#                          ^^^^^^ entity.name.function.operator.policylang
#                                ^ punctuation.separator.comma.policylang
#                                  ^^^^^^ entity.name.function.operator.policylang
#                                         ^^ keyword.operator.arrow.policylang
#                                            ^^^^^ keyword.control.action.policylang
