"""What completion offers: a module for each kind of word, what fits a place best first."""
