"""What several policies share: normalisation, weight files, words, quantisation, the residual corrector."""
