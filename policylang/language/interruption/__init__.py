"""Work that may be given up before it is done."""
