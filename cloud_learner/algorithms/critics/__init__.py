"""What values are: of states and of chunks, what they learn from, and the updates of algorithms that ask them."""
