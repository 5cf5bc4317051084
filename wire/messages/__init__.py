"""Everything two processes may say to each other; `all` is the whole list."""
