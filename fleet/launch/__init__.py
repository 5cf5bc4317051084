"""How processes are specified, built, started and kept running.

`process_specs` says which there are, `builders` makes what each one runs, `backend` keeps them alive, `up` runs the
main job.
"""
