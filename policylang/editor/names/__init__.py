"""Where policies say names: in one text, and in all the files around it."""
