"""How much faster than the expert a fleet becomes without him."""
