# SYNTAX TEST "source.policylang" "statements of several lines, and one whose parenthesis is never closed"

save (  # products
# <---- keyword.control.action.policylang
#    ^ punctuation.section.parens.begin.policylang
#       ^ comment.line.number-sign.policylang
#        ^^^^^^^^^ comment.line.number-sign.policylang
  mm in
# ^^ entity.name.function.operator.policylang
#    ^^ keyword.other.selector.policylang
    layers.*,
#   ^^^^^^^^ entity.name.namespace.module.policylang
#           ^ punctuation.separator.comma.policylang
  (bmm
# ^ punctuation.section.parens.begin.policylang
#  ^^^ entity.name.function.operator.policylang
    where is view) outside  # all
#   ^^^^^ keyword.other.selector.policylang
#         ^^ keyword.other.selector.policylang
#            ^^^^ support.type.property-name.policylang
#                ^ punctuation.section.parens.end.policylang
#                  ^^^^^^^ keyword.other.selector.policylang
#                           ^ comment.line.number-sign.policylang
#                            ^^^^ comment.line.number-sign.policylang

  block
# ^^^^^ keyword.other.selector.policylang
) in block
# <- punctuation.section.parens.end.policylang
# ^^ keyword.other.selector.policylang
#    ^^^^^ keyword.other.selector.policylang
save mm
# <---- keyword.control.action.policylang
#    ^^ entity.name.function.operator.policylang
save (mm, first
# <---- keyword.control.action.policylang
#    ^ punctuation.section.parens.begin.policylang
#     ^^ entity.name.function.operator.policylang
#       ^ punctuation.separator.comma.policylang
#         ^^^^^ keyword.other.selector.policylang
let kept = bmm
# <--- keyword.control.statement.policylang
#   ^^^^ entity.name.type.let.policylang
#        ^ keyword.operator.assignment.policylang
#          ^^^ entity.name.function.operator.policylang
