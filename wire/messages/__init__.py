"""Everything two processes may say to each other, one frozen type each.

`all` is the whole list, `local` what stays on a robot's computer, `fleet` robots, jobs and leases. For everybody.
"""
