"""What values are, of states and of chunks, what they learn from, and what algorithms have in common that ask them."""
