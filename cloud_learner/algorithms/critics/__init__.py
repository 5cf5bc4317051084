"""What values are, of states and of chunks, what they learn from, and updates and losses of algorithms that ask them."""
