"""``policylang demo``: a small Llama trained twice, without and with a policy, and what differs."""
