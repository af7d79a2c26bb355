; A name is known from its line on; it stands for one thing in the whole file.
(source_file) @local.scope
(let name: (identifier) @local.definition.var)
(phrase name: (identifier) @local.reference)
(chain_of name: (identifier) @local.reference)
