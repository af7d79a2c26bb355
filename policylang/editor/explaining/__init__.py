"""What hovers and hints say: the word under the pointer, and what a statement comes to on a snapshot."""
