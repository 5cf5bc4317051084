"""What an episode was, by whose word: its record, people's labels, models that learned to tell; docs/rewards.md.

Only `fleet` comes in: nobody who decides on versions, robots or demonstrations reads what a model says.
"""
