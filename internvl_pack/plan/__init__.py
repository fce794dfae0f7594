"""The run's one sequence of packs, and the optimizer steps that they make: pure functions of order, survey and options.

online.py | preset.py  ->  sequence.py: PackSequence  ->  groups.py: StepPlan  ->  steps, the same for every reader
"""
