"""Reading and decoding segments for the batches, in this process or in others.

Jobs go in, loaded steps come out in the order of need. Only `loading` may come in.
"""
