"""An agent with a small window: it sees a screen a step, lets the oldest go, and looks back when it has to.

    python examples/agent.py

Its screens are drawings the embedded model knows: first a key that gives shapes codes, then pages of shapes. The window
has room for three. Every step asks for a code of a page in the window, which takes the key; from the third page on the
key has left. Pages that were read behind it still know their codes. A page that came later does not, so the agent looks
back: it recalls the key in front of that page, asks again, and lets the key go; from then on that page knows as well.
Nothing is looked at twice, and only what a question lacks is computed; in the end everything is asked once more by
computing each prompt in full.
"""

from __future__ import annotations

from random import Random

from looseleaf import Answer, Image, Looseleaf, Reprefill, Window
from looseleaf.prompt.segments import Segment
from looseleaf.workloads.pictures import draw
from looseleaf.workloads.questions import NOT_SHOWN, cell_name, held_out
from looseleaf.workloads.scenes import Scene, Scenes

SCREENS, ROOM = 6, 3


class Agent:
    """A window, and what was asked of it."""

    def __init__(self, ll: Looseleaf, key: Image):
        self.window = Window(ll)
        self.key = self.window.push(key)
        self.pages: dict[str, int] = {}
        self.asked: list[tuple[list[Segment], Answer]] = []

    def see(self, name: str, screen: Image) -> None:
        """A new screen; the oldest leaves when there is no room."""
        self.pages[name] = self.window.push(screen)
        while sum(page.is_chunk for page in self.window.pages) > ROOM:
            self.window.slide()

    def answer(self, name: str, question: str) -> tuple[Answer, bool]:
        """From what is in the window; if it is not there, with the key recalled in front of the page in question."""
        answer = self._ask(question)
        if answer.text != NOT_SHOWN or self.key not in (page.number for page in self.window.evicted):
            return answer, False
        self.window.recall(self.key, at=[page.number for page in self.window.pages].index(self.pages[name]))
        answer = self._ask(question)
        self.window.evict(self.key)
        return answer, True

    def _ask(self, question: str) -> Answer:
        answer = self.window.ask(question)
        self.asked.append(([*(page.segment for page in self.window.pages), question], answer))
        return answer


def main() -> None:
    """Six screens, eleven questions."""
    chance = held_out().chance("agent", 4)
    world = Scenes(chance, held_out(), (224, 224), count=1 + SCREENS, legend=True, pairs=0)
    key, *screens = (Image(draw(picture)) for picture in world.pictures)
    with Looseleaf.open() as ll:
        agent, right = Agent(ll, key), 0
        for at, (screen, scene) in enumerate(zip(screens, world.scenes, strict=True)):
            agent.see(scene.tag, screen)
            for one in (scene, *world.scenes[max(0, at - 1) : at]):  # the new page, then the one before
                question, expected = question_about(one, world, chance)
                answer, looked_back = agent.answer(one.tag, question)
                right += answer.text == expected
                print(f"{question} {answer.text}{'' if answer.text == expected else f' (wrong: {expected})'}"
                      f"{', after a look back at the key' if looked_back else ''}: {answer.usage.fresh_tokens} of "
                      f"{answer.usage.prompt_tokens} tokens computed")  # fmt: skip
        seen = ll.linker.counters.vision_calls
        computed = sum(answer.usage.fresh_tokens for _, answer in agent.asked)
        in_full = [ll.ask(prompt, policy=Reprefill()) for prompt, _ in agent.asked]
        agree = sum(one.text == answer.text for one, (_, answer) in zip(in_full, agent.asked, strict=True))
        tokens = sum(one.usage.prompt_tokens for one in in_full)
        print(f"{right} right; {computed} tokens computed instead of {tokens}; {seen} images looked at, once each. "
              f"Computing every prompt in full gives {agree} of {len(in_full)} answers alike: where the key has left "
              f"it cannot know what a page remembers.")  # fmt: skip


def question_about(scene: Scene, world: Scenes, chance: Random) -> tuple[str, str]:
    """A question for the code of one cell of a page, and its answer."""
    at = chance.randrange(len(scene.cells))
    cell, (shape, _) = cell_name(at, scene.columns), scene.cells[at]
    return f"What is the code at {cell} of picture {scene.tag}?", world.codes[shape]


if __name__ == "__main__":
    main()
