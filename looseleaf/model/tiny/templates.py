"""Chat templates in the manner of each family's released checkpoint.

Every template takes content as a plain string or as a list of `{"type": "image"}`, `{"type": "video"}` and
`{"type": "text", "text": ...}` parts, any number of turns, and `add_generation_prompt`. Parts are rendered in the
order given; the LLaVA checkpoints move images in front of the text, which would forbid prompts that interleave
both. Those with tools also take messages of role `tool`, whose content may hold images. What this file does not know:
tokenizers and how many tokens an image becomes.
"""

_TOOLS_INTRODUCTION = (
    "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n"
    "You are provided with function signatures within <tools></tools> XML tags:\\n<tools>"
)
_TOOLS_USE = (
    "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\\n<tool_call>\\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>'
)


def _parts(image: str = "", video: str = "") -> str:
    """Jinja for one message's content; newlines in `image` and `video` are Jinja escapes, as blocks eat raw ones."""
    visual = f"{{% if part['type'] == 'image' %}}{{{{ '{image}' }}}}" if image else "{% if false %}"
    visual += f"{{% elif part['type'] == 'video' %}}{{{{ '{video}' }}}}" if video else ""
    listed = f"{visual}{{% elif part['type'] == 'text' %}}{{{{ part['text'] }}}}{{% endif %}}"
    return (
        "{% if message['content'] is string %}{{ message['content'] }}"
        f"{{% else %}}{{% for part in message['content'] %}}{listed}{{% endfor %}}{{% endif %}}"
    )


def _turns(body: str, *, start: str = "", generate: str) -> str:
    loop = f"{{% for message in messages %}}{body}{{% endfor %}}"
    return f"{start}{loop}{{% if add_generation_prompt %}}{{{{ '{generate}' }}}}{{% endif %}}"


def chatml(*, image: str = "", video: str = "", system: str = "", after_role: str = "\\n", end: str = "\\n") -> str:
    """`<|im_start|>role … <|im_end|>`; `system` is what the template says when the caller brings no system message."""
    greeting = f"{{{{ '<|im_start|>system\\n{system}<|im_end|>\\n' }}}}"
    first = f"{{% if loop.first and message['role'] != 'system' %}}{greeting}{{% endif %}}" if system else ""
    role = f"{{{{ '<|im_start|>' + message['role'] + '{after_role}' }}}}"
    body = f"{first}{role}{_parts(image, video)}{{{{ '<|im_end|>{end}' }}}}"
    return _turns(body, generate="<|im_start|>assistant\\n")


def chatml_with_tools(*, image: str, video: str) -> str:
    """`chatml` as Qwen writes it around tools: listed in the system turn, called in `<tool_call>`, and answered in a
    user turn by one `<tool_response>` for each message of role `tool` in a row. There is no default system message.
    """
    parts = f"{{% if message['content'] %}}{_parts(image, video)}{{% endif %}}"
    own = f"{{% set message = messages[0] %}}{parts}{{{{ '\\n\\n' }}}}"
    first = f"{{% if messages[0]['role'] == 'system' %}}{own}{{% endif %}}"
    listed = "{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}"
    listed = f"{{{{ '{_TOOLS_INTRODUCTION}' }}}}{listed}{{{{ '{_TOOLS_USE}<|im_end|>\\n' }}}}"
    start = f"{{% if tools %}}{{{{ '<|im_start|>system\\n' }}}}{first}{listed}{{% endif %}}"
    opens = "{% if loop.first or loop.previtem['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    closes = "{% if loop.last or loop.nextitem['role'] != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    response = f"{opens}{{{{ '\\n<tool_response>\\n' }}}}{parts}{{{{ '\\n</tool_response>' }}}}{closes}"
    call = (
        "{% for call in message['tool_calls'] or [] %}{% set call = call['function'] or call %}"
        "{% if message['content'] or not loop.first %}{{ '\\n' }}{% endif %}"
        "{{ '<tool_call>\\n{\"name\": \"' + call['name'] + '\", \"arguments\": ' }}"
        "{{ call['arguments'] if call['arguments'] is string else (call['arguments'] | tojson) }}"
        "{{ '}\\n</tool_call>' }}{% endfor %}"
    )
    turn = f"{{{{ '<|im_start|>' + message['role'] + '\\n' }}}}{parts}{call}{{{{ '<|im_end|>\\n' }}}}"
    body = f"{{% if message['role'] == 'tool' %}}{response}{{% else %}}{turn}{{% endif %}}"
    body = f"{{% if not (tools and loop.first and message['role'] == 'system') %}}{body}{{% endif %}}"
    return _turns(body, start=start, generate="<|im_start|>assistant\\n")


def vicuna(*, image: str) -> str:
    """`USER: … ASSISTANT: …`"""
    role = "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    return _turns(f"{role}{_parts(image)}{{{{ ' ' }}}}", generate="ASSISTANT:")


def mistral(*, image: str) -> str:
    """`[INST] … [/INST] …</s> `"""
    user = f"{{% if message['role'] == 'user' %}}{{{{ '[INST] ' }}}}{_parts(image)}{{{{ ' [/INST]' }}}}"
    reply = f"{{% elif message['role'] == 'assistant' %}}{{{{ ' ' }}}}{_parts(image)}{{{{ '</s> ' }}}}"
    system = f"{{% else %}}{{{{ '<<SYS>>\\n' }}}}{_parts(image)}{{{{ '\\n<</SYS>>\\n\\n' }}}}{{% endif %}}"
    return _turns(user + reply + system, generate="")


def deepseek(*, image: str, end: str, tools: bool = False) -> str:
    """`User: … Assistant: …<end>`, a blank line after each, behind a fixed opening sentence."""
    opening = "You are a helpful language and vision assistant.\\n\\n"
    user = f"{{% if message['role'] == 'user' %}}{{{{ 'User: ' }}}}{_parts(image)}{{{{ '\\n\\n' }}}}"
    reply = f"{{% elif message['role'] == 'assistant' %}}{{{{ 'Assistant: ' }}}}{_parts(image)}{{{{ '{end}' }}}}"
    if tools:
        reply += f"{{% elif message['role'] == 'tool' %}}{{{{ 'Tool: ' }}}}{_parts(image)}{{{{ '\\n\\n' }}}}"
    system = f"{{% else %}}{_parts(image)}{{{{ '\\n\\n' }}}}{{% endif %}}"
    greeting = f"{{% if messages[0]['role'] != 'system' %}}{{{{ '{opening}' }}}}{{% endif %}}"
    return _turns(user + reply + system, start=greeting, generate="Assistant:")


KIMI_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."


def kimi(*, image: str, video: str, system: str = KIMI_SYSTEM, tools: bool = False) -> str:
    """`<|im_user|>user<|im_middle|> … <|im_end|>` behind a system message; what a tool answers is the system's turn."""
    greeting = f"<|im_system|>system<|im_middle|>{system}<|im_end|>"
    start = f"{{% if messages[0]['role'] != 'system' %}}{{{{ '{greeting}' }}}}{{% endif %}}" if system else ""
    kind = "message['role']" if not tools else "('system' if message['role'] == 'tool' else message['role'])"
    role = f"{{{{ '<|im_' + {kind} + '|>' + message['role'] + '<|im_middle|>' }}}}"
    body = f"{role}{_parts(image, video)}{{{{ '<|im_end|>' }}}}"
    return _turns(body, start=start, generate="<|im_assistant|>assistant<|im_middle|>")


def smolvlm(*, image: str, video: str) -> str:
    """`<|im_start|>User: …<end_of_utterance>`; no space behind the colon when an image comes first."""
    visual_first = "message['content'] is not string and message['content'][0]['type'] == 'image'"
    role = f"{{{{ message['role'] | capitalize + (':' if {visual_first} else ': ') }}}}"
    body = f"{role}{_parts(image, video)}{{{{ '<end_of_utterance>\\n' }}}}"
    return _turns(body, start="{{ '<|im_start|>' }}", generate="Assistant:")


def llama3() -> str:
    """`<|start_header_id|>role<|end_header_id|> … <|eot_id|>`; writes the BOS token itself, as the original does."""
    role = "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    generate = "<|start_header_id|>assistant<|end_header_id|>\\n\\n"
    return _turns(f"{role}{_parts()}{{{{ '<|eot_id|>' }}}}", start="{{ bos_token }}", generate=generate)
