# SYNTAX TEST "source.policylang" "figures"

expect saved per block <= 40% of forward
# <------ keyword.control.statement.policylang
#      ^^^^^ keyword.other.selector.policylang
#            ^^^ keyword.other.selector.policylang
#                ^^^^^ keyword.other.selector.policylang
#                      ^^ keyword.operator.comparison.policylang
#                         ^^ constant.numeric.policylang
#                           ^ keyword.other.unit.policylang
#                             ^^ keyword.other.selector.policylang
#                                ^^^^^^^ support.type.property-name.policylang
expect recomputed flops <= 3 TFLOP
# <------ keyword.control.statement.policylang
#      ^^^^^^^^^^ keyword.other.selector.policylang
#                 ^^^^^ support.type.property-name.policylang
#                       ^^ keyword.operator.comparison.policylang
#                          ^ constant.numeric.policylang
#                            ^^^^^ keyword.other.unit.policylang
expect recomputed time per block <= 40 ms
# <------ keyword.control.statement.policylang
#      ^^^^^^^^^^ keyword.other.selector.policylang
#                 ^^^^ support.type.property-name.policylang
#                      ^^^ keyword.other.selector.policylang
#                          ^^^^^ keyword.other.selector.policylang
#                                ^^ keyword.operator.comparison.policylang
#                                   ^^ constant.numeric.policylang
#                                      ^^ keyword.other.unit.policylang
expect step time <= 900 ms
# <------ keyword.control.statement.policylang
#      ^^^^^^^^^ support.type.property-name.policylang
#                ^^ keyword.operator.comparison.policylang
#                   ^^^ constant.numeric.policylang
#                       ^^ keyword.other.unit.policylang
expect exposed <= 5% of step
# <------ keyword.control.statement.policylang
#      ^^^^^^^ support.type.property-name.policylang
#              ^^ keyword.operator.comparison.policylang
#                 ^ constant.numeric.policylang
#                  ^ keyword.other.unit.policylang
#                    ^^ keyword.other.selector.policylang
#                       ^^^^ support.type.property-name.policylang
expect peak <= 40 GiB
# <------ keyword.control.statement.policylang
#      ^^^^ support.type.property-name.policylang
#           ^^ keyword.operator.comparison.policylang
#              ^^ constant.numeric.policylang
#                 ^^^ keyword.other.unit.policylang
expect exactly 7 peak per block
# <------ keyword.control.statement.policylang
#      ^^^^^^^ keyword.other.selector.policylang
#              ^ constant.numeric.policylang
#                ^^^^ entity.name.function.operator.policylang
#                     ^^^ keyword.other.selector.policylang
#                         ^^^^^ keyword.other.selector.policylang
expect exactly 1_000 ms
# <------ keyword.control.statement.policylang
#      ^^^^^^^ keyword.other.selector.policylang
#              ^^^^^ constant.numeric.policylang
#                    ^^ entity.name.function.operator.policylang
expect at least 1 attention
# <------ keyword.control.statement.policylang
#      ^^ keyword.other.selector.policylang
#         ^^^^^ keyword.other.selector.policylang
#               ^ constant.numeric.policylang
#                 ^^^^^^^^^ support.function.group.policylang
expect no (mm where bytes > 1 GiB) offloaded
# <------ keyword.control.statement.policylang
#      ^^ keyword.other.selector.policylang
#         ^ punctuation.section.parens.begin.policylang
#          ^^ entity.name.function.operator.policylang
#             ^^^^^ keyword.other.selector.policylang
#                   ^^^^^ support.type.property-name.policylang
#                         ^ keyword.operator.comparison.policylang
#                           ^ constant.numeric.policylang
#                             ^^^ keyword.other.unit.policylang
#                                ^ punctuation.section.parens.end.policylang
#                                  ^^^^^^^^^ keyword.other.selector.policylang
