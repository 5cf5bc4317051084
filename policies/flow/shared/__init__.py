"""One network for robots of several shapes: columns by the names of dimensions, a row of its tables for each robot."""
