# SYNTAX TEST "source.policylang" "what holds of nodes"

save mm where bytes > 64 MiB and not is view
# <---- keyword.control.action.policylang
#    ^^ entity.name.function.operator.policylang
#       ^^^^^ keyword.other.selector.policylang
#             ^^^^^ support.type.property-name.policylang
#                   ^ keyword.operator.comparison.policylang
#                     ^^ constant.numeric.policylang
#                        ^^^ keyword.other.unit.policylang
#                            ^^^ keyword.operator.logical.policylang
#                                ^^^ keyword.operator.logical.policylang
#                                    ^^ keyword.other.selector.policylang
#                                       ^^^^ support.type.property-name.policylang
save time where time_per_gib <= 1.5e3 µs or shape[-1] == 8_192
# <---- keyword.control.action.policylang
#    ^^^^ entity.name.function.operator.policylang
#         ^^^^^ keyword.other.selector.policylang
#               ^^^^^^^^^^^^ support.type.property-name.policylang
#                            ^^ keyword.operator.comparison.policylang
#                               ^^^^^ constant.numeric.policylang
#                                     ^^ keyword.other.unit.policylang
#                                        ^^ keyword.operator.logical.policylang
#                                           ^^^^^^^^^ support.type.property-name.policylang
#                                                     ^^ keyword.operator.comparison.policylang
#                                                        ^^^^^ constant.numeric.policylang
save everything where from parameter and gathered input
# <---- keyword.control.action.policylang
#    ^^^^^^^^^^ keyword.other.selector.policylang
#               ^^^^^ keyword.other.selector.policylang
#                     ^^^^ keyword.other.selector.policylang
#                          ^^^^^^^^^ support.type.property-name.policylang
#                                    ^^^ keyword.operator.logical.policylang
#                                        ^^^^^^^^ support.type.property-name.policylang
#                                                 ^^^^^ support.type.property-name.policylang
save device where device == cuda:0 and dtype != float8*
# <---- keyword.control.action.policylang
#    ^^^^^^ entity.name.function.operator.policylang
#           ^^^^^ keyword.other.selector.policylang
#                 ^^^^^^ support.type.property-name.policylang
#                        ^^ keyword.operator.comparison.policylang
#                           ^^^^^^ constant.other.value.policylang
#                                  ^^^ keyword.operator.logical.policylang
#                                      ^^^^^ support.type.property-name.policylang
#                                            ^^ keyword.operator.comparison.policylang
#                                               ^^^^^^^ constant.other.value.policylang
save mm where crosses cut per 2 GiB or crosses block
# <---- keyword.control.action.policylang
#    ^^ entity.name.function.operator.policylang
#       ^^^^^ keyword.other.selector.policylang
#             ^^^^^^^ support.type.property-name.policylang
#                     ^^^ keyword.other.selector.policylang
#                         ^^^ keyword.other.selector.policylang
#                             ^ constant.numeric.policylang
#                               ^^^ keyword.other.unit.policylang
#                                   ^^ keyword.operator.logical.policylang
#                                      ^^^^^^^ support.type.property-name.policylang
#                                              ^^^^^ keyword.other.selector.policylang
save mm where crosses cut per auto
#             ^^^^^^^ support.type.property-name.policylang
#                     ^^^ keyword.other.selector.policylang
#                         ^^^ keyword.other.selector.policylang
#                             ^^^^ constant.language.policylang
save mm where feeds backward and user tagged and recorded offloaded
# <---- keyword.control.action.policylang
#    ^^ entity.name.function.operator.policylang
#       ^^^^^ keyword.other.selector.policylang
#             ^^^^^ support.type.property-name.policylang
#                   ^^^^^^^^ support.type.property-name.policylang
#                            ^^^ keyword.operator.logical.policylang
#                                ^^^^ support.type.property-name.policylang
#                                     ^^^^^^ support.type.property-name.policylang
#                                            ^^^ keyword.operator.logical.policylang
#                                                ^^^^^^^^ support.type.property-name.policylang
#                                                         ^^^^^ keyword.other.selector.policylang
save mm where annotated mine or annotated "two words"
# <---- keyword.control.action.policylang
#    ^^ entity.name.function.operator.policylang
#       ^^^^^ keyword.other.selector.policylang
#             ^^^^^^^^^ support.type.property-name.policylang
#                       ^^^^ constant.other.value.policylang
#                            ^^ keyword.operator.logical.policylang
#                               ^^^^^^^^^ support.type.property-name.policylang
#                                         ^ string.quoted.double.policylang
#                                          ^^^^^^^^^ string.quoted.double.policylang
#                                                   ^ string.quoted.double.policylang
save mm where users > 1 and is not multi_output
# <---- keyword.control.action.policylang
#    ^^ entity.name.function.operator.policylang
#       ^^^^^ keyword.other.selector.policylang
#             ^^^^^ support.type.property-name.policylang
#                   ^ keyword.operator.comparison.policylang
#                     ^ constant.numeric.policylang
#                       ^^^ keyword.operator.logical.policylang
#                           ^^ keyword.other.selector.policylang
#                              ^^^ keyword.operator.logical.policylang
#                                  ^^^^^^^^^^^^ support.type.property-name.policylang
