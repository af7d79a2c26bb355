(statement) @entry.around
(comment) @comment.inside
(comment)+ @comment.around
