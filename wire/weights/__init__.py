"""What a policy version is while it travels: manifests, chunks and deltas of safetensors files.

Nothing here imports torch: the gateway and a robot's uplink rebuild versions without it.
"""
