"""What several kinds of policy share: normalisation, weight files, words, quantisation, the residual corrector.

For kinds of policy; of the others, the learner and the residual strategy take a function each.
"""
