"""The answers: each a function from the state of a document to a value of the protocol."""
