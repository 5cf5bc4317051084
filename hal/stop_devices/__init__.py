"""What a person beside a robot stops it with: pedals, keys and GPIO lines, watched by the robot's own host.

For whoever hosts a driver. `config` says what is watched, `watch` watches; `evdev_keys` and `gpio_line` are devices.
"""
