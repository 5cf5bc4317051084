"""How each of lerobot's policies is divided into thinking and acting, and faster inference for some.

For `policies.lerobot`.
"""
