"""People's hands on a robot: whose messages it takes, and how it goes over from one who drives to the next.

Pure; used by control (`robot_edge.control.operator_override`) and by the uplink.
"""
