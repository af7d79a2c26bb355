"""What policylang costs and saves, measured beside named peers in the same run. One file a question."""
