[(statement) (parenthesized) (grouped)] @fold
(comment)+ @fold
