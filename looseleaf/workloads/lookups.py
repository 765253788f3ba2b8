"""Task f: the evidence is not in the prompt. The model asks for it with a `search` call and goes on when it is there.

Questions about people nobody in the prompt's pages speaks of. With the tool on offer the right answer is the call; once
the found pages stand behind it, the right answer is the fact. Without the tool it is "not shown".
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from looseleaf.workloads.documents import Documents
from looseleaf.workloads.questions import Question, Split

SEARCH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find pages in the library.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    },
}


def search_call(query: str) -> str:
    """What the model says to look something up."""
    return f"<tool_call>\n{json.dumps({'name': 'search', 'arguments': {'query': query}})}\n</tool_call>"


def look_up(library: Documents, chance: Random, split: Split) -> tuple[Question, str]:
    """A question `library` answers and the search call that finds its pages."""
    kind = chance.choice(("id_of", "value_of"))
    question = library.ask(kind, chance, split)
    name = next(word.strip("?.,") for word in question.text.split() if word.strip("?.,") in library.id_of)
    field = library.first if kind == "id_of" else library.second
    return question, search_call(f"{name} {field}")
