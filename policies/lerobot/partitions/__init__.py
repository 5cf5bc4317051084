"""How each lerobot policy is divided into thinking and acting, and faster inference for some.

Only `policies.lerobot` may come in.
"""
