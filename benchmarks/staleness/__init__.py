"""How well a fleet learns from what versions long gone did."""
