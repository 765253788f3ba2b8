"""Training the embedded models: recipes, prompts, batches, the loop, and how well the result answers.

`python -m looseleaf.training --help`. Read in this order: recipes (what is trained), prompts and batches (on what),
painter, vision, attention and families (how it is made fast), optimiser, loop, evaluate.
"""
