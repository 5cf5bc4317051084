"""Kill -9 of every process of a fleet at every stage of an update."""
