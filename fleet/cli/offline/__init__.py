"""`vla-fleet train | eval | compare`: learning from what is recorded and measuring what came of it, without a fleet.

Neither gateway nor robots nor a network are needed.
"""
