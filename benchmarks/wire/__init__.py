"""How much one gateway takes in from how many robots, and what people wait meanwhile; nobody else comes in."""
