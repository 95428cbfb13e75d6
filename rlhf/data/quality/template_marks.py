"""Marks by which texts that a chat template has already been written into are recognised, without a tokenizer.

They are the marks of published templates, those that tests/unit/published_templates.py renders whole. A text with marks
of any other template is recognised with its tokenizer (`rlhf/data/trainable.py`), from what that template writes.
"""

import re

from rlhf.data.chat_template import MARK_SHAPE

FENCED = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.S)

# Marks that look like tags or words, beside those that MARK_SHAPE finds, by the templates that write them
BRACKETED = {
    "Llama 2, Mistral": ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"),
    "Mistral since version 7": ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    "Gemma": ("<start_of_turn>", "<end_of_turn>"),
    "Seed": ("<seed:bos>", "<seed:eos>"),
    "GLM": ("[gMASK]",),
    "MiniMax Text": ("<beginning_of_sentence>", "<end_of_sentence>"),
    "MiniMax M": ("]~b]", "[e~["),
    "Bailing": ("<role>SYSTEM</role>", "<role>HUMAN</role>", "<role>ASSISTANT</role>"),
    "TeleChat": ("<_system>", "<_user>", "<_bot>"),
    "Alfred": ("<start_system>", "<start_user>", "<start_assistant>", "<end_message>"),
    "Nemotron": ("<SPECIAL_10>", "<SPECIAL_11>", "<extra_id_0>", "<extra_id_1>"),
    "Baichuan": ("<reserved_102>", "<reserved_103>", "<reserved_106>", "<reserved_107>"),
    "OpenChat": ("GPT4 Correct User:", "GPT4 Correct Assistant:"),
    "Code Llama 70B": ("<step> Source:", "Source: assistant\nDestination: user"),
}
# Headings in words count only together.
HEADINGS = {
    "Alpaca": ("### Instruction:", "### Response:"),
    "StarCoder 2": ("### Instruction\n", "### Response\n"),
    "Magicoder": ("@@ Instruction\n", "@@ Response\n"),
    "Guanaco": ("### Human:", "### Assistant:"),
    "Solar, StableBeluga": ("### User:", "### Assistant:"),
}
# Those that any report of a conversation may have count only if the text begins or ends as a template's does.
DIALOGUES = {
    "Vicuna": ("USER:", "ASSISTANT:"),
    "Falcon": ("User:", "Falcon:"),
    "ChatQA, DeepSeek LLM, ERNIE": ("User:", "Assistant:"),
    "LLaVA, XuanYuan": ("Human:", "Assistant:"),
}

_BRACKETED = re.compile(
    "|".join([MARK_SHAPE.pattern, *(re.escape(mark) for marks in BRACKETED.values() for mark in marks)]), re.I
)


def templated(text: str) -> bool:
    """Return whether the text holds marks of a chat template outside code between backticks.

    <s> and </s> count only around a text: elsewhere HTML strikes words out with them.
    """
    if any(heading in text for headings in (*HEADINGS.values(), *DIALOGUES.values()) for heading in headings[:1]):
        padded = f"{text}\n"  # a heading at the end has a line of its own
        if any(all(heading in padded for heading in headings) for headings in HEADINGS.values()):
            return True
        if any(_is_dialogue(text.strip(), *headings) for headings in DIALOGUES.values()):
            return True
    if not any(bracket in text for bracket in "<[]") and "GPT4" not in text:
        return False
    text = FENCED.sub("", text).strip()
    begins, ends = text.startswith("<s>"), text.endswith("</s>")
    around = (begins or ends) and (text.count("<s>"), text.count("</s>")) == (begins, ends)
    return around or bool(_BRACKETED.search(text))


def _is_dialogue(text: str, user: str, assistant: str) -> bool:
    """Return whether a text goes from a user's heading to an assistant's, and begins or ends with one of them.

    Headings in capitals may stand in one line, others begin one.
    """
    begins = r"(?<!\S)" if user.isupper() else "^"
    turns = re.search(rf"{begins}{user}.*{begins}{assistant}", text, re.S | re.M)
    return turns is not None and (text.startswith(user) or text.endswith(assistant))
