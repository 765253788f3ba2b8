"""`looseleaf demo`: a trained model answers questions about images, then about the same images moved, by every policy.

Read `show` first: it is what gets printed, part by part. `items` draws what is asked, `measure` asks it, `figures`
draws the picture and the plot.
"""

from looseleaf.demo.show import DemoOptions, run_demo

__all__ = ["DemoOptions", "run_demo"]
