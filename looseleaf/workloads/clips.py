"""Task d: short clips of numbered frames in which shapes appear, vanish, move and change colour, one event a frame."""

from __future__ import annotations

from random import Random

from looseleaf.workloads.masks import SHAPES
from looseleaf.workloads.pictures import COLOURS, Picture, blank
from looseleaf.workloads.questions import ROWS, Fact, Phrases, Question, Split, cell_name, form

GRID = 3

_COLOUR = Phrases(
    usual=("What colour is the {shape} in frame {frame}?", "Which colour has the {shape} in frame {frame}?",
           "In frame {frame}, what is the colour of the {shape}?", "In frame {frame}, what colour is the {shape}?",
           "Tell me the colour of the {shape} in frame {frame}.", "Which colour is the {shape} of frame {frame}?",
           "Frame {frame}: which colour does the {shape} have?"),
    held=("In frame {frame}, which colour has the {shape}?", "What is the colour of the {shape} in frame {frame}?"),
)  # fmt: skip
_SHAPE = Phrases(
    usual=("What shape is at {cell} of frame {frame}?", "Which shape does frame {frame} show at {cell}?",
           "In frame {frame}, what is the shape at {cell}?", "In frame {frame}, what shape is at {cell}?",
           "Tell me the shape at {cell} of frame {frame}.", "Which shape is at {cell} in frame {frame}?",
           "Frame {frame}, {cell}: which shape is it?"),
    held=("In frame {frame}, which shape is at {cell}?", "What is the shape at {cell} of frame {frame}?"),
)  # fmt: skip
_HAPPENED = Phrases(
    usual=("What happened in frame {frame}?", "What is new in frame {frame}?", "Which event does frame {frame} show?",
           "Tell me the event in frame {frame}.", "What is it that happened in frame {frame}?",
           "Which is the event of frame {frame}?", "In frame {frame}, what happened?", "Say what frame {frame} shows.",
           "What did happen in frame {frame}?", "Frame {frame} shows which event?"),
    held=("What is the event in frame {frame}?",),
)  # fmt: skip
_WHEN = Phrases(
    usual=(
        "In which frame is it that the {event}?", "Tell me the frame where the {event}.",
        "Which frame shows that the {event}?", "Say in which frame the {event}.",
        "When is it that the {event}, in which frame?", "Tell me the frame in which the {event}.",
        "In which frame do you see that the {event}?", "The {event}: in which frame?",
        "I need the frame in which the {event}.", "Tell me when the {event}.",
    ),
    held=("Tell me in which frame the {event}.",),
)  # fmt: skip
_FIRST = Phrases(
    usual=("Which came first: the {one} or the {other}?", "Of these, which happened first: the {one}, the {other}?"),
    held=("Which happened first: the {one} or the {other}?",),
)
_FORM_WHEN = Phrases(usual=("Fill in the frame of each event.", "Give each event its frame."),
                     held=("Fill in each event and its frame.",))  # fmt: skip
_FORM = Phrases(usual=("Fill in the {what} by frame.", "Give each frame its {what}."),
                held=("Fill in each frame and its {what}.",))  # fmt: skip


class Clip:
    """Frames 1, 2, … and what happened in each but the first."""

    def __init__(self, chance: Random, split: Split, side: int, *, frames: int) -> None:
        self.pictures: list[Picture] = []
        self.states: list[dict[str, tuple[str, int]]] = []
        """Shape to its colour and cell, by frame."""
        self.events: list[str] = []
        font = chance.choice(split.fonts)
        shapes, look = chance.sample(SHAPES, 7), chance.getrandbits(32)
        cells = chance.sample(range(GRID * GRID), 4)
        state = {shapes.pop(): (chance.choice(list(COLOURS)), cells.pop()) for _ in range(chance.randint(2, 4))}
        for number in range(frames):
            if number:
                state = dict(state)
                self.events.append(_happen(chance, state, shapes))
            self.states.append(state)
            self.pictures.append(_draw_frame(Random(look), state, side, font, str(number + 1)))
        self.absorbed = list(range(frames - 1))
        self.kinds = {"frame_colour": 2.0, "frame_shape": 1.0, "form_frames": 4.0}
        if frames > 1:
            self.kinds |= {"happened": 3.0, "when": 2.0, "form_events": 6.0, "form_when": 3.0}
        if frames > 2:
            self.kinds["first_event"] = 1.0

    def ask(self, kind: str, chance: Random, split: Split) -> Question:
        at = chance.randrange(len(self.states))
        state, number = self.states[at], at + 1
        later = chance.randrange(1, max(2, len(self.states)))
        single = [place for place, event in enumerate(self.events) if self.events.count(event) == 1]
        match kind:
            case "frame_colour":
                shape = chance.choice(list(state))
                text = _COLOUR.pick(chance, split).format(shape=shape, frame=number)
                return Question("clip", kind, text, state[shape][0], 1, (at,), (at,))
            case "frame_shape":
                shape = chance.choice(list(state))
                cell = cell_name(state[shape][1], GRID)
                return Question(
                    "clip", kind, _SHAPE.pick(chance, split).format(cell=cell, frame=number), shape, 1, (at,), (at,)
                )
            case "form_when" if single:
                facts = [Fact(f"the {self.events[one]}", f"frame {one + 2}", (one + 1,)) for one in single]
                text = _FORM_WHEN.pick(chance, split)
                return form("clip", kind, text, 2, range(len(self.states)), facts, chance, again=True)
            case "form_frames":
                return self._form_frames(chance, split)
            case "happened":
                text = _HAPPENED.pick(chance, split).format(frame=later + 1)
                return Question("clip", kind, text, self.events[later - 1], 2, (later - 1, later), (later,))
            case "when":
                if not single:
                    return self.ask("happened", chance, split)
                later = chance.choice(single) + 1
                event = self.events[later - 1]
                text = _WHEN.pick(chance, split).format(event=event)
                return Question("clip", kind, text, f"frame {later + 1}", 2, (later - 1, later), (later,))
            case "first_event":
                if len(single) < 2:
                    return self.ask("happened", chance, split)
                one, other = sorted(chance.sample(single, 2))
                answer, shown = self.events[one], [self.events[one], self.events[other]]
                chance.shuffle(shown)
                text = _FIRST.pick(chance, split).format(one=shown[0], other=shown[1])
                needs = tuple(sorted({one, one + 1, other, other + 1}))
                return Question("clip", kind, text, answer, 2, needs, (one + 1, other + 1))
            case _:
                kind, every = "form_events", tuple(range(len(self.states)))
                text = _FORM.pick(chance, split).format(what="event")
                facts = [Fact(f"{place + 1} the", event, (place,)) for place, event in enumerate(self.events, 1)]
                return form("clip", kind, text, 2, every, facts, chance, again=True)

    def _form_frames(self, chance: Random, split: Split) -> Question:
        """Colours of shapes, or what is in cells, here and there in the clip."""
        by_shape = chance.random() < 0.5
        text = _FORM.pick(chance, split).format(what="colours" if by_shape else "things")
        facts: list[Fact] = []
        for at, state in enumerate(self.states):
            for shape, (colour, cell) in state.items():
                if by_shape:
                    facts.append(Fact(f"{at + 1} {shape}", colour, (at,)))
                else:
                    facts.append(Fact(f"{at + 1} {cell_name(cell, GRID)}", f"{colour} {shape}", (at,)))
        return form("clip", "form_frames", text, 1, range(len(self.states)), facts, chance)


def _happen(chance: Random, state: dict[str, tuple[str, int]], unused: list[str]) -> str:
    """Change `state` by one event and name it."""
    options = ["moved", "turned"]
    if len(state) < 5 and unused:
        options += ["appeared", "appeared"]
    if len(state) > 2:
        options.append("vanished")
    event = chance.choice(options)
    free = [cell for cell in range(GRID * GRID) if cell not in {place for _, place in state.values()}]
    if event == "appeared":
        shape = unused.pop()
        state[shape] = (chance.choice(list(COLOURS)), chance.choice(free))
        return f"{shape} appeared"
    shape = chance.choice(list(state))
    colour, cell = state[shape]
    if event == "vanished":
        del state[shape]
        return f"{shape} vanished"
    if event == "moved":
        state[shape] = (colour, chance.choice(free))
        return f"{shape} moved"
    turned = chance.choice([other for other in COLOURS if other != colour])
    state[shape] = (turned, cell)
    return f"{shape} turned {turned}"


def _draw_frame(chance: Random, state: dict[str, tuple[str, int]], side: int, font: int, tag: str) -> Picture:
    sheet = blank(chance, side, side)
    large = side >= 200
    sheet.write(tag, 2 + chance.randrange(3), -4 if not large else 0, font, 2 if large else 1, COLOURS["orange"])
    head, edge = (28, 30) if large else (20, 20)
    pitch = min((side - edge) // GRID, (side - head) // GRID)
    left = edge + chance.randrange(max(1, side - edge - pitch * GRID))
    for number in range(GRID):
        sheet.write(str(number + 1), left + pitch * number + pitch // 2 - 6, head - 24, font, 0)
        sheet.write(ROWS[number], left - 14, head + pitch * number + pitch // 2 - 15, font, 0)
    for shape, (colour, cell) in state.items():
        row, column = divmod(cell, GRID)
        middle = (left + pitch * column + pitch // 2, head + pitch * row + pitch // 2)
        sheet.shape(shape, COLOURS[colour], *middle, 2 if large else 0)
    return sheet.finish()
