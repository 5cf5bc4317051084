"""What turns an observation into an action chunk; normalisation; weights as named tensors."""
