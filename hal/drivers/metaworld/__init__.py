"""MetaWorld in MuJoCo as a robot in real time, reached as `metaworld` through `hal.registry`."""
