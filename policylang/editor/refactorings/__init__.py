"""Other ways to write the same policy, as changes of its text: each is read again, and offered where nothing else was
said before."""
