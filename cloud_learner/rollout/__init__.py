"""Which robot is offered which policy version: canaries, promotion, rollback, and which files may go. No I/O."""
