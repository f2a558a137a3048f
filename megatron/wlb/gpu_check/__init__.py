"""What `tools/gpu_check.py` runs.

`sections` lists it, `supervision` has it run in a worker, `page` prints it; every other file is one check or measure.
"""
