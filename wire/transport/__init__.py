"""How messages travel: ZeroMQ with CURVE keys, shared memory between processes, queues within one.

`channel` has the protocols they keep. For everybody.
"""
