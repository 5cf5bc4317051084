"""Whatever anybody sends: nothing crashes, nothing grows, nothing changes that is not the sender's."""
