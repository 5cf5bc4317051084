"""How messages travel: ZeroMQ with CURVE keys, shared memory between processes, queues in one."""
