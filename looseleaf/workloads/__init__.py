"""Pictures, questions and answers by seed: what the embedded models are trained on and what reuse is measured with.

Read in this order: masks and pictures (drawing), questions (splits, wordings, hops), then one file a task: scenes
(legend and change), documents, clips, streams, lookups; albums puts them together, bounds says how many and how large.
"""
