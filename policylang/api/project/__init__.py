"""The project that policies stand in, and what it says of them."""
