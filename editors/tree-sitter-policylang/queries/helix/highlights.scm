; ../highlights.scm with the capture names of Helix.

(comment) @comment
(string) @string
(bundled) @string.special

; --- words ---

(action) @keyword
(modifier) @keyword.storage.modifier

[
  "policy" "requires" "include" "device" "let" "blocks" "undecided" "expect" "fuse" "chains" "over" "collapse" "round_trips" "chunk" "loss" "into" "tokens" "bucket" "prefetch" "ahead" "delay" "overlap" "keep" "order" "flight" "within" "peak" "up" "to" "rank" "as" "row" "saved" "recomputed" "offloaded" "exactly" "at" "least" "most" "no" "lossless" "everything" "first" "last" "every" "half" "of" "chain" "after" "before" "through" "in" "outside" "where" "per" "from" "block" "graph" "cut" "is" "schedule" "stages" "microbatches" "stage" "balance"
] @keyword

(step ["users" "inputs"] @keyword)
(per "module" @keyword)

["or" "and" "except" "feeding" "fed" "by" "not"] @keyword.operator

(undecided fate: (identifier) @constant.builtin (#eq? @constant.builtin "auto"))
(flag "cut" value: (identifier) @constant.builtin (#eq? @constant.builtin "auto"))

; --- figures ---

[(integer) (number) (ordinal) (range)] @constant.numeric
((version) @constant.numeric (#match? @constant.numeric "^[0-9]"))
"%" @constant.numeric
((unit) @constant.numeric
  (#any-of? @constant.numeric
    "B" "KB" "MB" "GB" "TB" "KiB" "MiB" "GiB" "TiB"
    "FLOP" "KFLOP" "MFLOP" "GFLOP" "TFLOP" "PFLOP" "FLOPs" "KFLOPs" "MFLOPs" "GFLOPs" "TFLOPs" "PFLOPs"
    "s" "ms" "us" "ns" "µs" "μs"))

((figure) @variable.other.member (#any-of? @variable.other.member "peak" "exposed" "flops" "operators" "time" "forward" "step" "memory" "host" "stage"))
(figure "step" "time") @variable.other.member
(figure "host" "memory") @variable.other.member

; --- properties of nodes ---

((property) @variable.other.member
  (#any-of? @variable.other.member
    "bytes" "numel" "ndim" "flops" "time" "time_per_gib" "users" "inputs" "group_size"
    "dtype" "device" "module" "overload"))
((property (path)) @variable.other.member (#match? @variable.other.member "^shape\\[-?[0-9]+\\]$"))
(comparison_test value: [(identifier) (path)] @constant)

(flag name: (identifier) @variable.other.member
  (#any-of? @variable.other.member "gathered" "crosses" "feeds" "user" "recorded" "annotated"))
(flag value: (identifier) @variable.other.member
  (#any-of? @variable.other.member
    "parameter" "buffer" "input" "backward" "view" "random" "multi_output" "mutated" "tagged"))

; --- names ---

(policy name: (_) @type)
(requires (identifier) @namespace)
(device_name) @constant
(let name: (identifier) @function)
(dimension) @variable.parameter
(module) @namespace

(phrase operator: (path) @function)
(chain_of operator: (path) @function)

; Groups of operators, and other names.
((phrase name: (identifier) @function.builtin) (#match? @function.builtin
  "^(matmul|attention|compute|all_gather|allgather|reduce_scatter|all_reduce|all_to_all|collective|wait|cast|view|random|pointwise|activation|reduction|norm)$"))
((chain_of name: (identifier) @function.builtin) (#match? @function.builtin
  "^(matmul|attention|compute|all_gather|allgather|reduce_scatter|all_reduce|all_to_all|collective|wait|cast|view|random|pointwise|activation|reduction|norm)$"))
((fuse (identifier) @function.builtin) (#match? @function.builtin
  "^(matmul|attention|compute|all_gather|allgather|reduce_scatter|all_reduce|all_to_all|collective|wait|cast|view|random|pointwise|activation|reduction|norm)$"))
((phrase name: (identifier) @function) (#not-match? @function
  "^(matmul|attention|compute|all_gather|allgather|reduce_scatter|all_reduce|all_to_all|collective|wait|cast|view|random|pointwise|activation|reduction|norm)$"))
((chain_of name: (identifier) @function) (#not-match? @function
  "^(matmul|attention|compute|all_gather|allgather|reduce_scatter|all_reduce|all_to_all|collective|wait|cast|view|random|pointwise|activation|reduction|norm)$"))

; --- marks ---

[(comparison) (arrow) "="] @operator
["," ";"] @punctuation.delimiter
["(" ")"] @punctuation.bracket
